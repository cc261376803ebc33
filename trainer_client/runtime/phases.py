"""What a step's seconds went to, in the phases in which its plan is predicted.

    clock   vision_forward  exchange  llm_forward  llm_backward  exchange  vision_backward  …
    phase   vision          exchange  llm          llm           exchange  vision
                            waiting   waiting      waiting       waiting

Replicas go through an exchange, a ring and the sum of gradients together, and whoever comes last
waits for nobody. So the least seconds that any of them spent there are what the work takes, and
what another spent above them it waited. The replicas compare these seconds once the step is over,
in one small collective, so that telling work from waiting changes nothing in the step.

Where events on a GPU's stream are the clock, the step's seconds are known only when the device has
run it, and the host should be ahead by then. So ``StepTimes`` reads them when they are asked for,
or else when the replicas next communicate.
"""

import math
from collections.abc import Hashable, Mapping
from functools import cached_property
from typing import NamedTuple

from trainer_client.runtime.clock import PhaseClock
from trainer_client.runtime.host_numbers import HostCopy, to_device
from trainer_client.runtime.peers import PeerGroup
from trainer_client.shard import MODALITIES, FeatureExchange, Microbatch, PlanSummary

Spent = Mapping[tuple[str, Hashable], float]
"""Seconds of each phase of a ``PhaseClock`` at each of its places."""

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


class OfWave(NamedTuple):
    """What a replica does alone for a wave, such as to encode its items."""

    wave: int


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


class StepTimes:
    """The seconds of a step that is all queued, and those of its phases.

    Making one is collective over ``everyone``, whose members all run ``chunks`` model chunks. Where
    the moments of the clock, which was stopped, are events on a stream, the seconds are compared
    before the next collective (or when the pool is closed), or when one replica asks: it then waits
    for the others to come that far.
    """

    def __init__(
        self, clock: PhaseClock, plan: PlanSummary, everyone: PeerGroup, *, chunks: int = 1
    ) -> None:
        self._clock = clock
        self._plan = plan
        self._everyone = everyone
        self._chunks = chunks
        self._comparing = False
        self._comparison: _Comparison | None = None
        if clock.on_stream:
            everyone.defer(self._compare)
        else:
            self._compare()

    @cached_property
    def spent(self) -> Spent:
        """Seconds by phase and place, as this replica's clock counted them."""
        return self._clock.seconds()

    @cached_property
    def phase_s(self) -> dict[str, float]:
        """This replica's seconds in each of ``PHASES``; they add up to those that its clock
        counted."""
        self._compare()
        assert self._comparison is not None, "just made"
        return self._comparison.seconds_by_phase()

    def _compare(self) -> None:
        if not self._comparing:  # else posting it has just asked for what was deferred
            self._comparing = True
            self._comparison = _Comparison(
                self.spent, self._plan, self._everyone, chunks=self._chunks
            )


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
    rings = [
        Place(LLM, ring, direction, chunk)
        for ring in range(plan.ring_count)
        for direction in directions
        for chunk in range(chunks)
    ]
    return [START, END, *waves, *rings]


class _Comparison:
    """The least seconds that any replica spent at each place where one was, on their way. A pack
    is compared by its number among those that several replicas share."""

    def __init__(
        self, spent: Spent, plan: PlanSummary, everyone: PeerGroup, *, chunks: int = 1
    ) -> None:
        rings = plan.rings
        self._spent: list[tuple[str, Hashable, float]] = []
        own = dict.fromkeys(_places(plan, chunks), math.inf)
        for (phase, place), seconds in spent.items():
            if isinstance(place, Place):
                if place.kind == LLM:
                    place = place._replace(number=rings[place.number])
                own[place] = seconds
            self._spent.append((phase, place, seconds))
        self._places = list(own)
        with everyone.aside():
            least = to_device(list(own.values()), everyone.device)
            everyone.post_least(least, action="comparing the seconds of phases").wait()
            self._least = HostCopy(least)

    def seconds_by_phase(self) -> dict[str, float]:
        read = zip(self._places, self._least.read(), strict=True)
        least: dict[Hashable, float] = {
            place: seconds for place, seconds in read if math.isfinite(seconds)
        }
        phases = dict.fromkeys(PHASES, 0.0)
        for phase, place, seconds in self._spent:
            work_s = min(seconds, least.get(place, seconds))
            phases[_phase_of(phase)] += work_s
            phases[WAITING] += seconds - work_s
        return phases
