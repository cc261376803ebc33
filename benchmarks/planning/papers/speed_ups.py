"""What the rows of the papers' tables share: a ratio, how far it is off, and pipelines priced.

    lengths ──► LayerWork of each replica ─┐
    shapes ──► analytic_profile ───────────┼─► time_stages (1F1B) ──► slowest replica ──► step_s
    the paper's split and recomputation ───┘

A speed-up is seconds a sample of the paper's baseline over those of its method, both from here.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from benchmarks.harness import Row
from dataservice.planning import time_stages
from dataservice.planning.layout.profile import LayerProfile, LayerWork, Pace

GROUP = "papers"
MOST_OFF = 15.0
_GATHERS = 3  # of ZeRO-3: weights forward and backward, gradients once


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeedUp:
    """One ratio of a paper's table. `printed`: as the paper has it; `found`: recomputed; `ours`:
    the same baseline over this project's planners, where they were asked. `off_because`: why it is
    off by more than the bar, with what would meet the paper; said only where it is."""

    source: str
    what: str
    printed: float
    found: float
    ours: float | None = None
    explanation: str
    off_because: str = ""

    @property
    def off_percent(self) -> float:
        """How far the recomputed ratio is from the printed one."""
        return 100 * abs(self.found / self.printed - 1)

    def row(self) -> Row:
        """The row of `--only papers`. A ratio that is off has to say why."""
        off = f"Off because {self.off_because}" if self.off_percent > MOST_OFF else ""
        ours = "" if self.ours is None else f", ours {self.ours:.2f}×"
        return Row(
            group=GROUP,
            what=f"{self.source}: {self.what}, speed-up off the paper's",
            figure=self.off_percent,
            unit="%",
            limit=MOST_OFF,
            paper=f"paper {self.printed:.2f}×, recomputed {self.found:.2f}×{ours}",
            explanation=f"{self.explanation} {off}".strip(),
        )


def numbered_layers(profile: LayerProfile) -> NDArray[np.int64]:
    """Entries that are layers, as papers count them: int64[layers]."""
    ends = [name.rsplit(".", 1)[-1] for name in profile.names]
    return np.array([place for place, end in enumerate(ends) if end.isdigit()])


def entry_bounds(profile: LayerProfile, layer_bounds: ArrayLike) -> NDArray[np.int64]:
    """A split in numbered layers, [stages + 1], as one in entries: what stands before a layer is on
    its stage, and what stands behind the last on the last."""
    layers = numbered_layers(profile)
    before = np.concatenate([[0], layers[:-1] + 1])  # the entries from there belong to a layer
    cuts = np.asarray(layer_bounds, np.int64)
    return np.concatenate([before[cuts[:-1]], [len(profile.names)]])


def split_by(amounts: NDArray[np.float64], stages: int) -> NDArray[np.int64]:
    """Layers cut where their running sum is nearest to each share: int64[stages + 1]."""
    reached = np.concatenate([[0.0], np.cumsum(amounts)])
    shares = reached[-1] * np.arange(stages + 1) / stages
    nearest: NDArray[np.int64] = np.abs(reached[None, :] - shares[:, None]).argmin(axis=1)
    return nearest


def paced(profile: LayerProfile, factors: NDArray[np.float64]) -> LayerProfile:
    """The profile with the seconds of each entry times `factors` float64[entries]."""

    def times(pace: Pace) -> Pace:
        return Pace(
            token_s=pace.token_s * factors,
            square_s=pace.square_s * factors,
            constant_s=pace.constant_s * factors,
            least_s=pace.least_s * factors,
        )

    return replace(
        profile,
        forward=times(profile.forward),
        backward=times(profile.backward),
        again=times(profile.again),
    )


def pipeline_step_s(
    profile: LayerProfile,
    replicas: Sequence[LayerWork],
    bounds: NDArray[np.int64],
    *,
    recomputed: NDArray[np.bool_],
    tensor_ranks: int = 1,
    bytes_per_s: float,
) -> float:
    """Seconds of a 1F1B step of replicas that meet at its end: the slowest of them, and the sum of
    gradients (ZeRO-1) of the fullest stage. `bounds` [stages + 1] over entries; `recomputed`
    bool[entries]: those that make their forward pass again."""
    stages = bounds.size - 1
    seconds = []
    for work in replicas:
        forward, backward = profile.seconds(work)
        split = time_stages(
            bounds,
            forward,
            backward + profile.added_s(work, "full") * recomputed,
            stages=stages,
            cut_bytes=profile.handed_on_bytes(work) / tensor_ranks,
            bytes_per_s=bytes_per_s,
        )
        seconds.append(split.step_s)
    count = len(replicas)
    fullest = float(np.add.reduceat(profile.state_bytes, bounds[:-1]).max())
    return max(seconds) + fullest * (count - 1) / count / bytes_per_s


def sharded_step_s(
    profile: LayerProfile, ranks: LayerWork, *, shards: int, bytes_per_s: float
) -> float:
    """Seconds of one microbatch under ZeRO-3, everything recomputed. `ranks` has the work of each
    rank. Ranks wait for one another in every module; its weights are sent behind that, and take
    what they need where it is more."""
    forward, backward = profile.seconds(ranks)
    taken = forward + backward + profile.added_s(ranks, "full")  # float64[ranks, entries]
    sent_s = weights_s(profile, shards, bytes_per_s)
    seconds = 0.0
    for module in dict.fromkeys(profile.modules):
        mine = np.array([name == module for name in profile.modules])
        seconds += max(float(taken[:, mine].sum(axis=1).max()), float(sent_s[mine].sum()))
    return seconds


def weights_s(profile: LayerProfile, shards: int, bytes_per_s: float) -> NDArray[np.float64]:
    """Seconds in which ZeRO-3 gathers the weights of each entry twice, and scatters their
    gradients: float64[entries]."""
    weights = profile.state_bytes - profile.gradient_bytes
    seconds: NDArray[np.float64] = _GATHERS * weights * (shards - 1) / shards / bytes_per_s
    return seconds
