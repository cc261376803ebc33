"""Stages and recomputation of one parallelism: a Replica, or an error that says what lacks room.

entries   vision.input vision.0 … vision.projector │ decoder.embedding decoder.0 │ decoder.1 …
first     └──────────────── one unit with the decoder's first layer ─────────────┘
cut       └─ one unit ──────────┘ └ every other layer is one: stages end anywhere
own       └──────── chunk 0 ───────────────────────┘└───── cut into the other stages
spread    └──────── on all stages, recomputed ─────┘└───── cut into all stages
bubbles   └──────── on all stages, later ──────────┘└───── cut into all stages
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from dataservice.core.errors import PlanningError
from dataservice.planning.layout.bubble_replica import least_encoder_bytes
from dataservice.planning.layout.cluster import NodeGroup
from dataservice.planning.layout.profile import RECOMPUTE, Floats, LayerProfile, LayerWork
from dataservice.planning.layout.recompute import FULL, RecomputeChoice, choose_recompute
from dataservice.planning.layout.replica import Parallel, Replica, decoding, states_of
from dataservice.planning.layout.stages import partition_stages

# Around the anchor; the step planner, and not the list, has the last word.
_RADIUS, _SPLITS = 2, 3


@dataclass(frozen=True, kw_only=True, slots=True)
class CutTask:
    """One parallelism of a model with this profile, for microbatches of `work`. `batches`: each
    whole batch as one. `ring_token_bytes`: keys and values of a token; `row_bytes`: a feature
    row."""

    profile: LayerProfile
    parallel: Parallel
    group: NodeGroup
    work: LayerWork
    batches: LayerWork
    ring_token_bytes: float
    row_bytes: float
    overlap_gradients: bool = False

    def cut(self, *, even: bool = False) -> Replica:
        """Stages by `partition_stages`, or of equally many layers; then the least recomputation
        that fits. Raises PlanningError."""
        bounds = self._bounds(even=even)
        fixed_bytes = self._outside_bytes()
        both = np.stack([seconds.mean(axis=0) for seconds in self.profile.seconds(self.work)])
        return Replica(
            parallel=self.parallel,
            profile=self.profile,
            bounds=bounds,
            recompute=self._recompute(bounds, fixed_bytes),
            ring_token_bytes=self.ring_token_bytes,
            row_bytes=self.row_bytes,
            encoder_fixed_bytes=fixed_bytes,
            last_pass=both if self.overlap_gradients else None,
        )

    @property
    def _encoding(self) -> int:
        """Entries before the decoder's."""
        return int(np.argmax(decoding(self.profile)))

    def _starts(self) -> NDArray[np.int64]:
        """First entries of what may be cut apart, and the end: int64[units + 1]."""
        first, names = self._encoding, self.profile.names
        skipped = 2 if names[first].endswith(".embedding") else 1
        rest = np.arange(first + skipped, len(names) + 1)
        if self.parallel.encoder_stage == "cut":
            # What comes in stays with the layer behind it, a projector with the one before it: the
            # runtime has them so.
            inside = range(1, first + 1)
            begin = [0, *(at for at in inside if not _joined(names[at - 1], names[at]))]
        else:
            begin = [0 if self.parallel.encoder_stage == "first" else first]
        return np.concatenate((begin, rest)).astype(np.int64)

    def _bounds(self, *, even: bool) -> NDArray[np.int64]:
        """int64[chunks + 1] over entries."""
        starts, parallel = self._starts(), self.parallel
        own = parallel.encoder_stage == "own"
        stages = parallel.pipeline_stages - own
        chunks = stages * parallel.virtual_stages
        if starts.size - 1 < chunks:
            raise PlanningError(
                f"{starts.size - 1} layers cannot be cut into {chunks} model chunks: use fewer "
                "pipeline stages or virtual stages"
            )
        if even:
            cuts = np.linspace(0, starts.size - 1, chunks + 1).round().astype(np.int64)
        else:
            cuts = self._partition(starts, stages)
        bounds: NDArray[np.int64] = starts[cuts]
        return np.concatenate(([0], bounds)) if own else bounds

    def _partition(self, starts: NDArray[np.int64], stages: int) -> NDArray[np.int64]:
        if stages * self.parallel.virtual_stages == 1:
            return np.array([0, starts.size - 1])
        forward, backward = (
            np.add.reduceat(seconds, starts[:-1], axis=1)
            for seconds in self.profile.seconds(self.work)
        )
        handed = self.profile.handed_on_bytes(self.work)[:, starts[1:] - 1]
        split = partition_stages(
            forward,
            backward,
            stages=stages,
            virtual_stages=self.parallel.virtual_stages,
            cut_bytes=handed / self.parallel.tensor_ranks,
            bytes_per_s=self.group.link_bytes_per_s(self.parallel.ranks_per_replica),
            radius=_RADIUS,
            top=_SPLITS,
        ).best
        return split.bounds.astype(np.int64)

    def _outside_bytes(self) -> float:
        """With encoders on all stages: their states, and what all that a rank encodes in a step
        keeps, every layer recomputed, until the pipeline has drained. In bubbles, what they need at
        least."""
        parallel, profile = self.parallel, self.profile
        if parallel.encoder_stage == "bubbles":
            return least_encoder_bytes(
                profile, self.work, stages=parallel.pipeline_stages, replicas=parallel.replicas
            )
        if parallel.encoder_stage != "spread":
            return 0.0
        encodes = ~decoding(profile)
        states = profile.state_bytes + profile.optimizer_bytes / parallel.replicas
        kept = profile.kept_bytes(self.batches, "full")[:, encodes].sum(axis=1).max()
        ranks = parallel.replicas * parallel.pipeline_stages
        return float(states[encodes].sum() + kept / ranks)

    def _recompute(self, bounds: NDArray[np.int64], outside_bytes: float) -> RecomputeChoice:
        first = int(bounds[0])
        profile, work, parallel = self.profile, self.work, self.parallel
        forward, backward = (seconds[:, first:] for seconds in profile.seconds(work))
        kept = np.stack([profile.kept_bytes(work, kind)[:, first:] for kind in RECOMPUTE], axis=2)
        added = np.stack([profile.added_s(work, kind)[:, first:] for kind in RECOMPUTE], axis=2)
        working: Floats = (kept[:, :, :1] - kept).max(axis=0)  # what is made anew for a moment
        found = choose_recompute(
            forward,
            backward,
            kept,
            added,
            bounds=bounds - first,
            stages=parallel.pipeline_stages,
            virtual_stages=parallel.virtual_stages,
            memory_bytes=self.group.device.memory_bytes,
            fixed_bytes=states_of(profile, bounds, parallel) + outside_bytes,
            working_bytes=np.maximum(working, 0.0),
            objective="stage",
        )
        spread = np.full(first, FULL, np.int8)
        return replace(found, choice=np.concatenate([spread, found.choice]))


def _joined(before: str, entry: str) -> bool:
    """Whether no stage ends between these two of an encoder."""
    return before.endswith(".input") or entry.endswith(".projector")
