"""Packs and items of replicas that meet once a step, by what each does in the whole step.

Such replicas go at their own pace, and wait for another where it encodes what they need: a balance
of every wave makes them wait in each, and one of no wave need not. So items stay with their text,
packs are seated by all that they take, and only what a replica then has too much goes elsewhere.

    wave 0 [▓▓▒▒][▓▓  ]   wave 1 [▓▓  ][▓▓▒▒]      ▓ decoder  ▒ its own items: both have done as
                                                   much in the end, and neither waited

Shapes: N replicas, P packs, M modalities, m items; seconds are those of one stage, that which has
most to do.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dataservice.core.plan import StepPlan
from dataservice.planning.context.plan import ContextPlan
from dataservice.planning.stages.dispatch import MODALITIES, EncoderItems
from dataservice.planning.step_bound import StageParts

# Items moved, for each replica, and what the fullest must lose by it of all that it has.
_MOVES = 2
_LEAST = 1e-3


def seconds_at_home(
    waves: Sequence[ContextPlan], items: EncoderItems, parts: StageParts
) -> list[NDArray[np.float64]]:
    """What each pack of each wave takes a replica, the items of its text included, which are shared
    by all its replicas: float64[packs of the wave] each. `items` have their packs by their place in
    `waves`."""
    sizes = [len(wave.time_s) for wave in waves]
    encoding_s = np.bincount(items.pack, _on_stage(items, parts), sum(sizes))
    return [
        wave.time_s * parts.decoder + of_wave / wave.degrees
        for wave, of_wave in zip(waves, np.split(encoding_s, np.cumsum(sizes)[:-1]), strict=True)
    ]


def keep_near(grouped: StepPlan, items: EncoderItems, parts: StageParts) -> NDArray[np.int32]:
    """The replica of each item int32[m], in a plan whose packs are placed: at home, but what the
    fullest replica has too much goes to the idlest. O(m log m + N²)."""
    held_s = np.repeat(grouped.pack_seconds, grouped.pack_degree) * parts.decoder
    item_s, replica_of = _on_stage(items, parts), items.home.copy()
    load_s = np.bincount(grouped.pack_replicas, held_s, grouped.replicas)
    load_s += np.bincount(replica_of, item_s, grouped.replicas)
    by_replica = np.argsort(replica_of, kind="stable")
    ends = np.cumsum(np.bincount(replica_of, minlength=grouped.replicas))
    held = np.split(by_replica, ends[:-1])
    for _ in range(_MOVES * grouped.replicas):
        fullest, idlest = int(load_s.argmax()), int(load_s.argmin())
        mine = held[fullest]
        saved_s = np.minimum(item_s[mine], load_s[fullest] - load_s[idlest] - item_s[mine])
        if saved_s.max(initial=0.0) <= _LEAST * load_s[fullest]:
            break
        at = int(saved_s.argmax())
        item = mine[at]
        held[fullest] = np.delete(mine, at)
        held[idlest] = np.append(held[idlest], item)
        load_s[fullest] -= item_s[item]
        load_s[idlest] += item_s[item]
        replica_of[item] = idlest
    return replica_of


def _on_stage(items: EncoderItems, parts: StageParts) -> NDArray[np.float64]:
    """Seconds of each item on the stage: float64[m]."""
    seconds: NDArray[np.float64] = items.seconds * parts.encoders[items.phase % MODALITIES]
    return seconds
