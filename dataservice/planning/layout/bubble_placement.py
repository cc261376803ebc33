"""Kernels of encoders into gaps: each at the earliest place that it fits, in order.

A *gap* is a time in which a resource of a device, its processors or its links, is free of the
backbone. A *stream* is a pipeline's kernels of one direction: hop by hop (encoder stages in the
order in which a microbatch passes them), each kernel after the one before it of its encoder. A
resource runs its kernels in the stream's order, so the earliest fit of each is the earliest end of
all. Time reversed, the same is the latest start.

    processors  ▓▓▓▓▓▓   ▓▓▓▓    ▓▓▓▓▓▓▓▓  ▓▓▓▓▓      ▓ backbone
                      c0     c2            c4         encoder compute in TP and PP bubbles
    links             ──     ──            ──         backbone communication
                          m1    m3                    encoder communication under backbone compute
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dataservice.planning.kernels.compile import kernel

COMPUTE, LINKS = 0, 1


class Gaps(NamedTuple):
    """Free times, in turn: `start_s`, `end_s` float64[gap]. Those of hop h and resource r are
    bounds[h, r, 0] to bounds[h, r, 1], int64[hop, 2, 2]."""

    start_s: NDArray[np.float64]
    end_s: NDArray[np.float64]
    bounds: NDArray[np.int64]


class Stream(NamedTuple):
    """Kernels of one microbatch in the order in which a pipeline runs them: `seconds` float64[u],
    `resource` and `encoder` int64[u]; hop h has those from offsets[h] on, int64[hop + 1].
    `transfer_s` float64[encoder]."""

    seconds: NDArray[np.float64]
    resource: NDArray[np.int64]
    encoder: NDArray[np.int64]
    offsets: NDArray[np.int64]
    transfer_s: NDArray[np.float64]


@kernel
def place(
    stream: Stream, gaps: Gaps, releases: NDArray[np.float64], by_s: float, entering: bool
) -> tuple[NDArray[np.float64], NDArray[np.float64], int]:
    """Starts [microbatch, kernel] and ends [microbatch] of microbatches released at these times,
    and how many of them end by `by_s`; what comes after is not placed. The transfer to or from
    the backbone comes before the first kernel (`entering`) or after the last.
    O(kernels + gaps).
    """
    encoders = stream.transfer_s.size
    hops = stream.offsets.size - 1
    starts = np.empty((releases.size, stream.seconds.size), np.float64)  # [microbatch, kernel]
    ends = np.empty(releases.size, np.float64)  # [microbatch]
    clock = np.full((hops, 2), -np.inf)  # float64[hop, resource]: end of its last kernel
    at = gaps.bounds[:, :, 0].copy()  # int64[hop, resource]: the gap looked at
    ready = np.empty(encoders, np.float64)  # float64[encoder]
    passed = np.empty(encoders, np.bool_)  # bool[encoder]: has kernels in this hop
    for j in range(releases.size):
        for e in range(encoders):
            ready[e] = releases[j] + (stream.transfer_s[e] if entering else 0.0)
        for h in range(hops):
            passed[:] = False
            for u in range(stream.offsets[h], stream.offsets[h + 1]):
                encoder, resource = stream.encoder[u], stream.resource[u]
                now = max(clock[h, resource], ready[encoder])
                gap = at[h, resource]
                while max(now, gaps.start_s[gap]) + stream.seconds[u] > gaps.end_s[gap]:
                    gap += 1
                at[h, resource] = gap
                starts[j, u] = max(now, gaps.start_s[gap])
                clock[h, resource] = ready[encoder] = starts[j, u] + stream.seconds[u]
                passed[encoder] = True
            ready += np.where(passed, stream.transfer_s, 0.0)
        ends[j] = -np.inf
        for e in range(encoders):
            # The transfer out of the last hop counts where it goes to the backbone.
            ends[j] = max(ends[j], ready[e] - (stream.transfer_s[e] if entering else 0.0))
        if ends[j] > by_s:
            return starts, ends, j
    return starts, ends, releases.size


@kernel
def gaps_without(gaps: Gaps, stream: Stream, starts: NDArray[np.float64]) -> Gaps:
    """The gaps that are left when the stream's kernels run at `starts` [microbatch, kernel]."""
    hops = gaps.bounds.shape[0]
    # Resources may share gaps, and each kernel may cut one in two.
    room = (gaps.bounds[:, :, 1] - gaps.bounds[:, :, 0]).sum() + starts.size
    start_s = np.empty(room, np.float64)
    end_s = np.empty(room, np.float64)
    bounds = np.empty_like(gaps.bounds)
    done = 0
    for h in range(hops):
        first, last = stream.offsets[h], stream.offsets[h + 1]
        for resource in range(2):
            bounds[h, resource, 0] = done
            gap, end = gaps.bounds[h, resource, 0], gaps.bounds[h, resource, 1]
            free_from = gaps.start_s[gap]
            for j in range(starts.shape[0]):
                for u in range(first, last):
                    if stream.resource[u] != resource:
                        continue
                    # By its middle: rounding may put an end a hair beyond its gap.
                    while gaps.end_s[gap] < starts[j, u] + 0.5 * stream.seconds[u]:
                        if gaps.end_s[gap] > free_from:
                            start_s[done], end_s[done] = free_from, gaps.end_s[gap]
                            done += 1
                        gap += 1
                        free_from = gaps.start_s[gap]
                    if starts[j, u] > free_from:
                        start_s[done], end_s[done] = free_from, starts[j, u]
                        done += 1
                    free_from = starts[j, u] + stream.seconds[u]
            while gap < end:
                if gaps.end_s[gap] > free_from:
                    start_s[done], end_s[done] = free_from, gaps.end_s[gap]
                    done += 1
                gap += 1
                if gap < end:
                    free_from = gaps.start_s[gap]
            bounds[h, resource, 1] = done
    return Gaps(start_s[:done].copy(), end_s[:done].copy(), bounds)


@kernel
def most_held(
    forward: Stream,
    backward: Stream,
    forward_s: NDArray[np.float64],
    backward_s: NDArray[np.float64],
) -> NDArray[np.int64]:
    """Most microbatches that a pipeline holds on each hop, int64[hop], with kernels at these starts
    [microbatch, kernel]: each from its first forward kernel there to its last backward kernel, or
    to its last forward kernel where no backward follows."""
    count, hops = forward_s.shape[0], forward.offsets.size - 1
    most = np.zeros(hops, np.int64)  # int64[hop]
    taken = np.empty(count, np.float64)  # float64[microbatch]
    freed = np.empty(count, np.float64)
    for h in range(hops):
        first, last = forward.offsets[h], forward.offsets[h + 1]
        back, end = backward.offsets[hops - 1 - h], backward.offsets[hops - h]
        if first == last:
            continue
        for j in range(count):
            taken[j], freed[j] = np.inf, -np.inf
            for u in range(first, last):
                taken[j] = min(taken[j], forward_s[j, u])
                freed[j] = max(freed[j], forward_s[j, u] + forward.seconds[u])
            for u in range(back, end):
                freed[j] = max(freed[j], backward_s[j, u] + backward.seconds[u])
        for j in range(count):
            held = 0
            for k in range(count):
                held += taken[k] <= taken[j] < freed[k]
            most[h] = max(most[h], held)
    return most


def reversed_gaps(gaps: Gaps) -> Gaps:
    """The same with time running backwards, from the last hop to the first."""
    bounds = gaps.start_s.size - gaps.bounds[::-1, :, ::-1]
    return Gaps(
        np.ascontiguousarray(-gaps.end_s[::-1]),
        np.ascontiguousarray(-gaps.start_s[::-1]),
        np.ascontiguousarray(bounds),
    )


def reversed_stream(stream: Stream) -> Stream:
    """The same from the last kernel to the first."""
    return Stream(
        np.ascontiguousarray(stream.seconds[::-1]),
        np.ascontiguousarray(stream.resource[::-1]),
        np.ascontiguousarray(stream.encoder[::-1]),
        np.ascontiguousarray(stream.seconds.size - stream.offsets[::-1]),
        stream.transfer_s,
    )
