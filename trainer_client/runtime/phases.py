"""What a step's seconds went to, in the phases in which its plan is predicted.

    clock   vision_forward  exchange  llm_forward  llm_backward  exchange  vision_backward  …
    phase   vision          exchange  llm          llm           exchange  vision
                            waiting   waiting      waiting       waiting

Replicas go through an exchange, a ring and the sum of gradients together, and whoever comes last
waits for nobody. So the least seconds that any of them spent there are what the work takes, and
what another spent above them it waited. The replicas compare these seconds once the step is over,
in one small collective, so that telling work from waiting changes nothing in the step.
"""

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

import torch

from trainer_client.runtime.peers import PeerGroup
from trainer_client.shard import FeatureExchange, Microbatch, PlanSummary

Spent = Mapping[tuple[str, Hashable], float]
"""Seconds of each phase of a ``PhaseClock`` at each of its places."""

MODALITIES = ("vision", "audio")  # in the order of their exchanges, on every replica
EXCHANGE, GRADIENTS, LLM, BUBBLE, WAITING = "exchange", "gradients", "llm", "bubble", "waiting"
PHASES = (*MODALITIES, EXCHANGE, LLM, GRADIENTS, WAITING)
FORWARD, BACKWARD = "forward", "backward"


class Place(NamedTuple):
    """What replicas go through together: an exchange of a wave, a pack in a model chunk, or the
    start or the end of the step. ``kind`` is a modality, ``llm`` or ``step``; ``number`` that of
    the wave or the pack."""

    kind: str
    number: int
    direction: str
    chunk: int = 0


START, END = Place("step", 0, FORWARD), Place("step", 0, BACKWARD)


def moves_rows(exchange: FeatureExchange, *, replica: int) -> bool:
    """Whether this replica sends a feature row to another one, or receives one."""
    splits = zip(exchange.send_splits, exchange.recv_splits, strict=True)
    return any(sent or received for k, (sent, received) in enumerate(splits) if k != replica)


def pack_place(microbatch: Microbatch, direction: str, *, chunk: int = 0) -> Place | None:
    """A microbatch's pack; None where this replica holds it alone."""
    if len(microbatch.cp_group) == 1:
        return None
    return Place(LLM, microbatch.pack, direction, chunk)


def seconds_by_phase(
    spent: Spent, plan: PlanSummary, everyone: PeerGroup, *, chunks: int = 1
) -> dict[str, float]:
    """This replica's seconds in each of ``PHASES``; they add up to those that its clock counted.

    Collective over ``everyone``, whose members all run ``chunks`` model chunks of ``plan``.
    """
    least = _least_seconds(spent, _places(plan, chunks), everyone)
    phases = dict.fromkeys(PHASES, 0.0)
    for (phase, place), seconds in spent.items():
        work_s = min(seconds, least.get(place, seconds))
        phases[_phase_of(phase)] += work_s
        phases[WAITING] += seconds - work_s
    return phases


def _phase_of(name: str) -> str:
    """The plan's phase: both passes of a module are one, and what has no module is counted with
    the gradients, which are summed once a step as well."""
    if name == BUBBLE:
        return WAITING
    phase = name.removesuffix(f"_{FORWARD}").removesuffix(f"_{BACKWARD}")
    return phase if phase in PHASES else GRADIENTS


def _places(plan: PlanSummary, chunks: int) -> list[Place]:
    """Every place of a step, in the same order on all replicas."""
    directions = (FORWARD, BACKWARD)
    waves = [
        Place(m, wave, d) for wave in range(plan.wave_count) for m in MODALITIES for d in directions
    ]
    packs = [
        Place(LLM, pack, direction, chunk)
        for pack in plan.ring_packs
        for direction in directions
        for chunk in range(chunks)
    ]
    return [START, END, *waves, *packs]


def _least_seconds(
    spent: Spent, places: Sequence[Place], everyone: PeerGroup
) -> dict[Hashable, float]:
    """The least seconds that any replica spent at each place where one was."""
    own = dict.fromkeys(places, math.inf)
    for (_, place), seconds in spent.items():
        if isinstance(place, Place):
            own[place] = seconds
    least = torch.tensor(list(own.values()), dtype=torch.float64, device=everyone.device)
    everyone.post_least(least, action="comparing the seconds of phases").wait()
    return {
        place: seconds for place, seconds in zip(own, least.tolist(), strict=True)
        if math.isfinite(seconds)
    }  # fmt: skip
