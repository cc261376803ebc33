"""Seconds that a step is longer by for its gradients: ZeRO-1 over data-parallel ranks.

Gradients of a layer are reduced and scattered, its weights gathered. A trainer that waits for the
step's end shows all of it. One that overlaps sends a layer's gradients while those before it still
run the last backward pass, and gathers a layer's weights while those before it already run the
first forward pass:

    stage 0   B5 B4 B3 ▸ next                links    g5 ── g4 ──── g3 ──│ shown
    stage 1   B9 B8 B7 ┄┄┄┄┄┄┄┄ drained      links    g9 ── g8 ── g7     nothing shown
"""

from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dataservice.planning.layout.profile import Floats


def whole_gradients_s(held_bytes: ArrayLike, ranks: int, bytes_per_s: float) -> Floats:
    """Seconds of sending so many bytes around `ranks`, one way: of the shape of `held_bytes`."""
    seconds: Floats = np.asarray(held_bytes, np.float64) * ((ranks - 1) / ranks / bytes_per_s)
    return seconds


def shown_gradients_s(
    scatter_s: Floats,
    gather_s: Floats,
    last_pass: Floats,
    *,
    bounds: NDArray[np.int64],
    stages: int,
) -> float:
    """What passes do not hide of `scatter_s`, `gather_s` float64[layers], of the stage that shows
    most. `last_pass` float64[2, layers]: forward and backward seconds of one microbatch; `bounds`
    int64[chunks + 1]: chunk c is on stage c mod `stages`. O(layers)."""
    chunks = [slice(low, high) for low, high in pairwise(bounds.tolist())]
    forward = [float(last_pass[0, chunk].sum()) for chunk in chunks]
    backward = [float(last_pass[1, chunk].sum()) for chunk in chunks]
    scattered = gathered = 0.0
    for stage in range(stages):
        # Behind its last backward pass those of the stages before it still run; its other chunks
        # ended before that.
        own, others = chunks[stage], chunks[stage + stages :: stages]
        waiting_s = sum(float(scatter_s[chunk].sum()) for chunk in others)
        late_s = _late_s(scatter_s[own][::-1], last_pass[1, own][::-1], waiting_s)
        scattered = max(scattered, late_s - sum(backward[:stage]))
        # Before a chunk's first forward pass, those of the chunks before it run.
        fetching_s = 0.0
        for chunk in range(stage, len(chunks), stages):
            fetched_s, used_s = gather_s[chunks[chunk]], last_pass[0, chunks[chunk]]
            early_s = _early_s(fetched_s, used_s, fetching_s)
            gathered = max(gathered, early_s - sum(forward[:chunk]))
            fetching_s += float(fetched_s.sum())
    return scattered + gathered


def _late_s(sent_s: Floats, made_s: Floats, waiting_s: float) -> float:
    """How long after the last of them is made all are sent, one after the other, each after it is
    made; `waiting_s` of others go first."""
    made, sent = 0.0, waiting_s
    for send_s, make_s in zip(sent_s, made_s, strict=True):
        made += make_s
        sent = max(sent, made) + send_s
    return float(max(sent - made, 0.0))


def _early_s(fetched_s: Floats, used_s: Floats, fetching_s: float) -> float:
    """How much earlier than its use fetching has to begin, one after the other, each before it is
    used; `fetching_s` of others go first."""
    fetched, used = fetching_s, 0.0
    for fetch_s, use_s in zip(fetched_s, used_s, strict=True):
        fetched += fetch_s
        used = max(used, fetched) + use_s
    return float(used - used_s.sum())
