"""What planning a step may take, and about what each part of it takes.

Planning goes on for the sake of a better plan for so long, or for this part of the step. What work
takes is told by its size, never by a clock, so that plans are the same everywhere. The figures are
those of one core of an AMD EPYC: within twice of what was measured on most steps, and above it on
steps of few long samples.
"""

LEAST_S, SHARE = 0.05, 0.01
# Of waves that level many samples: a sample, a wave, and a replica of a wave.
_SAMPLE_S, _WAVE_S, _SEAT_S = 1e-7, 3.5e-4, 5e-7
# Of packs formed jointly with their groups: a sample, times that where attention goes both ways,
# and a wave.
_JOINT_S, _BOTH_WAYS, _JOINT_WAVE_S = 6e-6, 1.5, 5e-4
# Of all later stages: a sample, an item, a replica of a wave, more where it encodes, and the search
# for an order of the waves.
_LATER_S, _ITEM_S, _LATER_SEAT_S, _ENCODING_S, _ORDER_S = 5e-8, 1.2e-7, 1.5e-7, 3e-7, 3e-3
# Where encoders share the memory: a sample and a piece more, as waves part and dispatch is mended.
_ROOM_S, _PIECE_S = 1.2e-6, 2e-7


def forming_s(samples: int, waves: int, replicas: int) -> float:
    """Seconds of forming so many waves in one pass."""
    return _SAMPLE_S * samples + (_WAVE_S + _SEAT_S * replicas) * waves


def joint_s(samples: int, waves: int, *, both_ways: bool) -> float:
    """Seconds of forming packs and groups jointly."""
    return _JOINT_S * samples * (_BOTH_WAYS if both_ways else 1.0) + _JOINT_WAVE_S * waves


def later_s(
    samples: int, items: int, pieces: float | None, waves: int, replicas: int, stages: int
) -> float:
    """Seconds of all stages after waves are formed; `pieces` are what the items fill where they
    share the memory, None where they do not."""
    order_s = _ORDER_S if stages > 1 and waves > 2 else 0.0
    room_s = 0.0 if pieces is None else _ROOM_S * samples + _PIECE_S * pieces
    seats_s = (_LATER_SEAT_S + (_ENCODING_S if items else 0.0)) * replicas * waves
    return _LATER_S * samples + _ITEM_S * items + room_s + seats_s + order_s


class Effort:
    """What planning a step has taken so far, in seconds of the estimates above, and what it may
    take: the step has `step_s` at least, or in the best plan so far."""

    def __init__(self, step_s: float) -> None:
        self.step_s = step_s
        self.taken_s = 0.0

    def take(self, seconds: float) -> None:
        """Count what is done whatever it takes."""
        self.taken_s += seconds

    def allows(self, seconds: float) -> bool:
        """Whether it may take so much more."""
        return self.taken_s + seconds <= max(LEAST_S, SHARE * self.step_s)

    def spend(self, seconds: float) -> bool:
        """Whether it may; then it is counted."""
        allowed = self.allows(seconds)
        self.taken_s += seconds * allowed
        return allowed
