"""What a cut of the layers costs: seconds of each chunk, from layer times and what crosses a cut.

A transfer that nothing hides keeps its sender busy: the forward of a chunk ends with sending its
activations on, the backward with sending the gradient of its input back.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dataservice.core.errors import PlanningError
from dataservice.planning.kernels.compile import kernel

# Equal microbatches for each device where none are given: enough for a steady state.
_MICROBATCHES_A_DEVICE = 4


class StageTimes(NamedTuple):
    """Sums over the layers before each cut, all float64[microbatch, layer + 1], in seconds.

    Cut l lies before layer l; `send` and `send_back` are what a transfer over it takes, forward
    and backward: 0 at both ends.
    """

    forward: NDArray[np.float64]
    backward: NDArray[np.float64]
    send: NDArray[np.float64]
    send_back: NDArray[np.float64]


class MeanTimes(NamedTuple):
    """The same, mean over microbatches, as float64[layer + 1]: `work` is forward and backward."""

    work: NDArray[np.float64]
    send: NDArray[np.float64]
    send_back: NDArray[np.float64]


def mean_times(times: StageTimes) -> MeanTimes:
    """The mean microbatch."""
    return MeanTimes(
        work=(times.forward + times.backward).mean(axis=0),
        send=times.send.mean(axis=0),
        send_back=times.send_back.mean(axis=0),
    )


def stage_times(
    forward_s: ArrayLike,
    backward_s: ArrayLike,
    *,
    stages: int,
    microbatches: int | None,
    cut_bytes: ArrayLike | None,
    gradient_bytes: ArrayLike | None,
    bytes_per_s: float,
) -> StageTimes:
    """Checked, and summed. Arguments as `partition_stages` has them; raises PlanningError."""
    forward, backward = layer_times(forward_s, backward_s, stages, microbatches)
    if not bytes_per_s > 0:
        raise PlanningError(
            f"bytes_per_s is {bytes_per_s}; give what a link carries, above 0, or inf for no cost"
        )
    sent = cut_table(cut_bytes, "cut_bytes", forward.shape)
    returned = (
        sent if gradient_bytes is None else cut_table(gradient_bytes, "gradient_bytes", sent.shape)
    )
    apart = stages > 1  # one device sends nothing to itself
    return StageTimes(
        forward=_before(forward),
        backward=_before(backward),
        send=_over(sent / bytes_per_s * apart),
        send_back=_over(returned / bytes_per_s * apart),
    )


def layer_times(
    forward_s: ArrayLike, backward_s: ArrayLike, stages: int, microbatches: int | None
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Both as float64[microbatch, layer]; times of one microbatch are those of all of them."""
    at_least("stages", stages, 1)
    forward = np.asarray(forward_s, dtype=np.float64)
    backward = np.asarray(backward_s, dtype=np.float64)
    if forward.shape != backward.shape or forward.ndim not in (1, 2) or 0 in forward.shape:
        raise PlanningError(
            f"forward_s has shape {forward.shape} and backward_s {backward.shape}; give both as "
            "[layer], or both as [microbatch, layer], with at least one of each"
        )
    for name, values in (("forward_s", forward), ("backward_s", backward)):
        if not (values.min() >= 0 and values.max() < np.inf):
            raise PlanningError(
                f"{name} spans {values.min()}..{values.max()}; times are ≥ 0 and finite: mend the "
                "profile or the cost model that gave them"
            )
    if forward.ndim == 2:
        if microbatches is not None and microbatches != len(forward):
            raise PlanningError(
                f"microbatches is {microbatches} beside times of {len(forward)}; leave it out, or "
                "give times as [layer]"
            )
        return forward, backward
    count = _MICROBATCHES_A_DEVICE * stages if microbatches is None else int(microbatches)
    at_least("microbatches", count, 1)
    return np.tile(forward, (count, 1)), np.tile(backward, (count, 1))


def cut_table(values: ArrayLike | None, name: str, shape: tuple[int, ...]) -> NDArray[np.float64]:
    """Bytes after each layer as float64[microbatch, layer]; none given: none sent."""
    if values is None:
        return np.zeros(shape)
    table = np.asarray(values, dtype=np.float64)
    if table.shape not in (shape, shape[1:]):
        raise PlanningError(
            f"{name} has shape {table.shape}; give the bytes of one microbatch after each layer, "
            f"as {shape[1:]} or {shape}: the last is not read"
        )
    if not (table.min() >= 0 and table.max() < np.inf):
        raise PlanningError(f"{name} spans {table.min()}..{table.max()}; bytes are ≥ 0 and finite")
    return np.broadcast_to(table, shape)


def at_least(name: str, value: int, least: int) -> None:
    """Raises PlanningError naming a count that is too small."""
    if value < least:
        raise PlanningError(f"{name} is {value}; it is at least {least}")


def check_chunks(layers: int, stages: int, virtual_stages: int) -> int:
    """The number of chunks. Raises PlanningError unless each gets a layer."""
    at_least("stages", stages, 1)
    at_least("virtual_stages", virtual_stages, 1)
    chunks = stages * virtual_stages
    if chunks > layers:
        raise PlanningError(
            f"{stages} stages of {virtual_stages} chunks are {chunks} chunks for {layers} layers; "
            f"each needs a layer: take at most {max(1, layers // stages)} virtual stages, or at "
            f"most {layers} stages"
        )
    return chunks


def check_bounds(
    bounds: ArrayLike, layers: int, stages: int, virtual_stages: int
) -> NDArray[np.int64]:
    """int64[chunks + 1] that rise from 0 to `layers`. Raises PlanningError otherwise."""
    chunks = check_chunks(layers, stages, virtual_stages)
    cuts = np.asarray(bounds, dtype=np.int64)
    rising = cuts.shape == (chunks + 1,) and bool((np.diff(cuts) > 0).all())
    if not rising or cuts[0] != 0 or cuts[-1] != layers:
        raise PlanningError(
            f"bounds are {cuts.tolist()}; {chunks} chunks of {layers} layers have {chunks + 1} "
            f"bounds that rise from 0 to {layers}, with a layer in each chunk"
        )
    return cuts


def _before(values: NDArray[np.float64]) -> NDArray[np.float64]:
    sums = np.zeros((values.shape[0], values.shape[1] + 1))
    np.cumsum(values, axis=1, out=sums[:, 1:])
    return sums


def _over(seconds: NDArray[np.float64]) -> NDArray[np.float64]:
    """Of each cut: what follows layer l crosses cut l + 1, and nothing crosses the ends."""
    cuts = np.zeros((seconds.shape[0], seconds.shape[1] + 1))
    cuts[:, 1:-1] = seconds[:, :-1]
    return cuts


@kernel
def chunk_durations(
    times: StageTimes, bounds: NDArray[np.int64], durations: NDArray[np.float64]
) -> None:
    """Fills `durations`, [kind, microbatch, chunk] flat, as `makespan` reads them."""
    microbatches = times.forward.shape[0]
    chunks = bounds.size - 1
    backward = microbatches * chunks
    for m in range(microbatches):
        for c in range(chunks):
            first, end = bounds[c], bounds[c + 1]
            at = m * chunks + c
            durations[at] = times.forward[m, end] - times.forward[m, first] + times.send[m, end]
            durations[backward + at] = (
                times.backward[m, end] - times.backward[m, first] + times.send_back[m, first]
            )
