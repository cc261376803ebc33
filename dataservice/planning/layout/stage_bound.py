"""What no split's step goes below, and the split for which that is least: a second anchor.

Whatever the split, device d of 1F1B begins when the first microbatch has come through the layers
before its own, and ends when the last one's gradients have gone back through them. W = p − d of its
forwards run ahead; then it waits for the first microbatch to go on to the end and come back, and
after its last forward for the last microbatch to do so. What it works and waits is a sum over its
own layers and over those before and behind, so the least of all splits is found as the anchor is.

    device d   ··F F F········B F B F B F········B··B··B··
                 └─ W ─┘      └─ there and back  └─ the last one's way back
"""

import numpy as np
from numpy.typing import NDArray

from dataservice.planning.layout.stage_anchor import minmax_split
from dataservice.planning.layout.stage_times import StageTimes
from dataservice.planning.loads.problem import certify


def bounded_split(
    times: StageTimes, stages: int, virtual_stages: int
) -> tuple[NDArray[np.int64], float]:
    """The split int64[chunks + 1] with the least bound on its step, and seconds that no split's
    step goes below: the least bound of all, or the microbatch that takes longest alone."""
    alone = float((times.forward + times.backward)[:, -1].max())
    if virtual_stages > 1:
        return _bounded_interleaved(times, stages, virtual_stages, alone)
    terms = [_device_terms(times, stages - device) for device in range(stages)]
    begin = np.stack([np.stack(first) for first, _ in terms], axis=1)  # [term, chunk, layer + 1]
    end = np.stack([np.stack(last) for _, last in terms], axis=1)
    bounds, slowest = minmax_split(begin, end)
    return bounds, max(slowest, alone)


Cuts = list[NDArray[np.float64]]


def _device_terms(times: StageTimes, ahead: int) -> tuple[Cuts, Cuts]:
    """Of a device that runs `ahead` forwards ahead: what each bound adds by its first cut and by
    its last, each [term][layer + 1]."""
    forward, backward, send, send_back = times
    count = len(forward)
    ahead = min(ahead, count)
    # Before the first cut: the way here of the first microbatch, and the way back of the last.
    come, gone = forward[0] + send[0], backward[-1]
    # After the last cut: there and back again, of the first microbatch and of the last.
    first_back = _on(forward[0]) + send[0] + _on(backward[0]) + send_back[0]
    last_back = _on(forward[-1]) + _on(backward[-1]) + send_back[-1]
    ahead_on, rest_on = _span(forward[:ahead], send[:ahead]), _span(forward[ahead:], send[ahead:])
    early = _span_back(backward[: count - ahead], send_back[: count - ahead])
    late = _span_back(backward[count - ahead :], send_back[count - ahead :])
    last = _span_back(backward[-1:], send_back[-1:])
    # Until the first backward either the forwards ahead are done, or the first microbatch goes on
    # and comes back; from the last forward on, the backwards left, or the last microbatch.
    work_ahead = come + ahead_on[0], ahead_on[1]
    wait_first = come - forward[0], forward[0] + first_back
    work_late = late[0] + gone, late[1]
    wait_last = last[0] + gone, last_back + last[1]
    ways = [(work_ahead, work_late), (wait_first, work_late), (work_ahead, wait_last)]
    # With nothing between the two waits they are one.
    ways.append((wait_first, wait_last) if count > ahead else ways[0])
    begin = [fill[0] + rest_on[0] + early[0] + drain[0] for fill, drain in ways]
    end = [fill[1] + rest_on[1] + early[1] + drain[1] for fill, drain in ways]
    return begin, end


def _span(
    forward: NDArray[np.float64], send: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Forwards of the chunk between two cuts, as what each cut adds: [layer + 1] both."""
    return -forward.sum(axis=0), (forward + send).sum(axis=0)


def _span_back(
    backward: NDArray[np.float64], send_back: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The same of backwards, whose transfer is at the first cut."""
    return (send_back - backward).sum(axis=0), backward.sum(axis=0)


def _on(sums: NDArray[np.float64]) -> NDArray[np.float64]:
    """One microbatch through all layers behind each cut, [layer + 1]."""
    return np.asarray(sums[-1] - sums)


def _bounded_interleaved(
    times: StageTimes, stages: int, virtual_stages: int, alone: float
) -> tuple[NDArray[np.int64], float]:
    """With several chunks a device: all work and the least of all fills, spread evenly; a bound of
    spreading layers over devices in any way."""
    work = (times.forward + times.backward).sum(axis=0)
    fill = times.forward[0] + times.backward[-1]
    chunks = stages * virtual_stages
    begin = times.send_back.sum(axis=0) - work + fill + times.send[0]
    end = work + times.send.sum(axis=0)
    bounds, _ = minmax_split(np.tile(begin, (1, chunks, 1)), np.tile(end, (1, chunks, 1)))
    layers = np.sort(np.diff(work))[::-1]
    spread = certify(layers, stages, equal_count=False)
    return bounds, max(_filled(times, stages, virtual_stages, fill), spread, alone)


def _filled(
    times: StageTimes, stages: int, virtual_stages: int, ends: NDArray[np.float64]
) -> float:
    """All work, and what devices wait at both ends, spread evenly over the devices.

    Device d begins its j-th chunk when the first microbatch has come through all before it, and
    until then has run no more than its earlier chunks for a round of p microbatches; the end
    mirrors this. The mean over j of what that leaves idle, summed over devices, is (p − 1 − d) / v
    times `ends` of device d's layers, first forward and last backward. That is least where late
    devices hold most, and none holds more than fills the step.
    """
    work = (times.forward + times.backward).sum(axis=0)
    count, total = len(times.forward), float(work[-1])
    if count % stages:  # the ends of a round that is not whole are others
        return total / stages
    first = stages * times.forward[0] - times.forward[:stages].sum(axis=0)
    last = stages * times.backward[-1] - times.backward[-stages:].sum(axis=0)
    # A round whose other microbatches are longer than the first keeps devices busy meanwhile.
    busier = float(first.min() + last.min()) * (virtual_stages - 1) / virtual_stages
    own, at_ends = np.diff(work), np.diff(ends)
    share = float((at_ends[own > 0] / own[own > 0]).max(initial=0.0))
    ahead = np.arange(stages, dtype=np.float64)  # of the last device, the one before it, ...

    def waits(step_s: float) -> float:
        each = min(share * step_s, float(ends[-1]))
        held = np.clip(float(ends[-1]) - ahead * each, 0.0, each)
        return float((ahead * held).sum())

    low, high = total / stages, total + float(ends[-1]) * stages
    for _ in range(60):
        middle = (low + high) / 2
        enough = stages * middle >= total + busier + waits(middle) / virtual_stages
        low, high = (low, middle) if enough else (middle, high)
    return low
