"""A pipeline schedule as data: what each stage runs, in order. It prints and parses.

    0: F0 F1 B0 F2 B1 B2          stage 0 of 2, three microbatches, 1F1B
    1: F0 B0 F1 B1 F2 B2

``F`` is a forward and ``B`` a backward, the number a microbatch's place in the order of
execution, and ``F3.1`` the stage's second model chunk (virtual stage 1; ``.0`` is left out).
With v virtual stages, stage s of p holds model chunks s, s+p, ..., and every chunk hands its
output to the next stage, the last stage to the first.

Every schedule can be run: its constructor checks that no stage waits for ever, and that messages
between two stages are received in the order in which they are sent.
"""

import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

from trainer_client.runtime.faults import LayoutError

FORWARD, BACKWARD = "F", "B"
Acted = TypeVar("Acted")

_ACTION = re.compile(r"([FB])(\d+)(?:\.(\d+))?")


@dataclass(frozen=True, slots=True)
class Action:
    """A forward or backward of one microbatch through one of a stage's model chunks."""

    kind: str
    microbatch: int
    virtual_stage: int = 0

    def __str__(self) -> str:
        chunk = f".{self.virtual_stage}" if self.virtual_stage else ""
        return f"{self.kind}{self.microbatch}{chunk}"

    @staticmethod
    def parse(text: str) -> "Action":
        """Read what ``str`` gives. Raises LayoutError."""
        found = _ACTION.fullmatch(text)
        if found is None:
            raise LayoutError(f"{text!r} is no action; write F3, B3, or F3.1 for virtual stage 1")
        return Action(found[1], int(found[2]), int(found[3] or 0))


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineSchedule:
    """``actions[s]`` is what stage s runs, in order: every microbatch forward and backward
    through each of its ``virtual_stages`` model chunks, from ``first_chunk`` on: those before it
    have encoder layers alone, of which a ``BubbleSchedule`` tells.

    Raises LayoutError where an action is missing or double, or the stages would wait for one
    another for ever. Construction costs O(actions).
    """

    virtual_stages: int
    microbatches: int
    actions: tuple[tuple[Action, ...], ...]
    first_chunk: int = 0

    def __post_init__(self) -> None:
        if self.virtual_stages > 1 and self.stages == 1:
            raise LayoutError(
                f"one stage cannot have {self.virtual_stages} virtual stages: it would hand "
                "chunks to itself; give it one chunk"
            )
        for stage, actions in enumerate(self.actions):
            self._check_complete(stage, actions)
        self._check_channels()
        deque(self.walk(), maxlen=0)  # raises where the stages wait for ever

    @property
    def stages(self) -> int:
        """p, the number of pipeline ranks."""
        return len(self.actions)

    @property
    def chunks(self) -> int:
        """Model chunks of the whole pipeline: stages × virtual stages."""
        return self.stages * self.virtual_stages

    def chunk(self, stage: int, action: Action) -> int:
        """The model chunk that an action of a stage runs."""
        return action.virtual_stage * self.stages + stage

    def source(self, stage: int, action: Action) -> tuple[int, Action] | None:
        """The stage and action whose message this one takes in; None where none does: the
        first chunk's forward, and the last chunk's backward, which begins with the loss."""
        before = self.chunk(stage, action) + (-1 if action.kind == FORWARD else 1)
        return self._at(before, action)

    def target(self, stage: int, action: Action) -> tuple[int, Action] | None:
        """The stage and action that take in this one's message; None where it sends none."""
        after = self.chunk(stage, action) + (1 if action.kind == FORWARD else -1)
        return self._at(after, action)

    def _at(self, chunk: int, action: Action) -> tuple[int, Action] | None:
        if not self.first_chunk <= chunk < self.chunks:
            return None
        virtual_stage, stage = divmod(chunk, self.stages)
        return stage, Action(action.kind, action.microbatch, virtual_stage)

    def __str__(self) -> str:
        return "\n".join(
            f"{stage}: {' '.join(map(str, actions))}" for stage, actions in enumerate(self.actions)
        )

    @staticmethod
    def parse(text: str) -> "PipelineSchedule":
        """Read what ``str`` gives. Raises LayoutError."""
        lines = [line.partition(":") for line in text.strip().splitlines()]
        if [number.strip() for number, _, _ in lines] != [str(s) for s in range(len(lines))]:
            raise LayoutError(f"a schedule has one line a stage, '0: F0 B0', '1: ...': {text!r}")
        actions = tuple(tuple(map(Action.parse, rest.split())) for _, _, rest in lines)
        every = [action for of_stage in actions for action in of_stage]
        return PipelineSchedule(
            virtual_stages=1 + max((action.virtual_stage for action in every), default=0),
            microbatches=1 + max((action.microbatch for action in every), default=-1),
            actions=actions,
        )

    def _check_complete(self, stage: int, actions: tuple[Action, ...]) -> None:
        wanted = {
            Action(kind, microbatch, virtual_stage)
            for kind in (FORWARD, BACKWARD)
            for microbatch in range(self.microbatches)
            for virtual_stage in range(self.virtual_stages)
            if virtual_stage * self.stages + stage >= self.first_chunk
        }
        if len(actions) != len(wanted) or set(actions) != wanted:
            wrong = sorted(str(action) for action in wanted.symmetric_difference(actions))
            raise LayoutError(
                f"stage {stage} must run {self.microbatches} microbatches forward and backward "
                f"through {self.virtual_stages} chunks, each once; missing or too many: "
                f"{', '.join(wrong) or 'one that is there twice'}"
            )

    def _check_channels(self) -> None:
        sent: dict[tuple[int, int, str], list[Action]] = {}
        taken: dict[tuple[int, int, str], list[Action]] = {}
        for stage, action in self._each():
            if (target := self.target(stage, action)) is not None:
                sent.setdefault((stage, target[0], action.kind), []).append(target[1])
            if (source := self.source(stage, action)) is not None:
                taken.setdefault((source[0], stage, action.kind), []).append(action)
        for (sender, receiver, kind), messages in sent.items():
            if taken.get((sender, receiver, kind)) != messages:
                raise LayoutError(
                    f"stage {receiver} takes the {kind} messages of stage {sender} in another "
                    f"order than they are sent: {' '.join(map(str, messages))}"
                )

    def needs(self, stage: int, action: Action) -> Iterator[tuple[int, Action]]:
        """The stages and actions that must be over before this one begins, besides those before it
        on its stage."""
        source = self.source(stage, action)
        if source is not None:
            yield source
        if action.kind == BACKWARD:
            yield stage, Action(FORWARD, action.microbatch, action.virtual_stage)

    def walk(self) -> Iterator[tuple[int, Action]]:
        """All actions with their stages, in an order in which they can run."""
        return walk(self.actions, self.needs)

    def _each(self) -> Iterator[tuple[int, Action]]:
        for stage, actions in enumerate(self.actions):
            for action in actions:
                yield stage, action


@lru_cache(maxsize=64)
def one_forward_one_backward(
    stages: int, virtual_stages: int, microbatches: int
) -> PipelineSchedule:
    """1F1B, or interleaved 1F1B with virtual stages: the schedule that the planner simulates.

    Each stage runs warm-up forwards, then one forward and one backward in turn, then the
    backwards left; microbatches go in rounds of ``stages`` through a stage's first chunk, then
    through its second (Narayanan et al., 2021, section 2.2). A last round that they do not fill is
    that of a whole one, without the actions of those that are not there.

    Raises LayoutError where there is less than one stage or virtual stage. O(actions).
    """
    if stages < 1 or virtual_stages < 1 or microbatches < 0:
        raise LayoutError(
            f"{stages} stages, {virtual_stages} virtual stages, {microbatches} microbatches: "
            "there must be at least one of each (microbatches may be 0)"
        )
    actions = tuple(
        _stage_actions(stage, stages, virtual_stages, microbatches) for stage in range(stages)
    )
    return PipelineSchedule(
        virtual_stages=virtual_stages, microbatches=microbatches, actions=actions
    )


def _warm_up(stage: int, stages: int, virtual_stages: int) -> int:
    """Number of forwards that a stage runs before it alternates one forward and one backward."""
    ahead = stages - 1 - stage
    return ahead if virtual_stages == 1 else 2 * ahead + (virtual_stages - 1) * stages


def _stage_actions(
    stage: int, stages: int, virtual_stages: int, microbatches: int
) -> tuple[Action, ...]:
    total = -(-microbatches // stages) * stages * virtual_stages  # of whole rounds
    warm_up = _warm_up(stage, stages, virtual_stages)
    actions: list[Action] = []
    forwards = backwards = 0
    while backwards < total:
        if forwards < total and forwards - backwards <= warm_up:
            microbatch, chunk = _place(forwards, stages, virtual_stages)
            actions.append(Action(FORWARD, microbatch, chunk))
            forwards += 1
        else:
            microbatch, chunk = _place(backwards, stages, virtual_stages)
            actions.append(Action(BACKWARD, microbatch, virtual_stages - 1 - chunk))
            backwards += 1
    return tuple(action for action in actions if action.microbatch < microbatches)


def _place(index: int, stages: int, virtual_stages: int) -> tuple[int, int]:
    """Microbatch and local chunk of a stage's index-th forward, in whole rounds."""
    rounds, inside = divmod(index, stages * virtual_stages)
    return rounds * stages + inside % stages, inside // stages


def walk(
    actions: Sequence[Sequence[Acted]], needs: Callable[[int, Acted], Iterable[tuple[int, Acted]]]
) -> Iterator[tuple[int, Acted]]:
    """Every stage's actions in an order in which they can run: each after those before it on its
    stage, and after the (stage, action) pairs that it needs. O(actions).

    Raises LayoutError at the point where no stage can go on.
    """
    done: set[tuple[int, Acted]] = set()
    at = [0] * len(actions)
    moved = True
    while moved:
        moved = False
        for stage, mine in enumerate(actions):
            while at[stage] < len(mine) and done.issuperset(needs(stage, mine[at[stage]])):
                yield stage, mine[at[stage]]
                done.add((stage, mine[at[stage]]))
                at[stage] += 1
                moved = True
    stuck = [
        f"{mine[place]} of stage {stage}"
        for stage, (place, mine) in enumerate(zip(at, actions, strict=True))
        if place < len(mine)
    ]
    if stuck:
        raise LayoutError(
            f"the stages wait for one another for ever at {', '.join(stuck)}; move forwards "
            "to the front (a longer warm-up)"
        )
