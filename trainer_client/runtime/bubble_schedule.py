"""A pipeline schedule with encoders of its own, as data that prints and parses.

    0: EF0[0:2] F0 EF2[0:1] F1 EF2[1:2] B0 F2 B1 B2 EB2[0:2] EB0[0:2]
    1: EF1[0:2] F0 B0 F1 B1 F2 B2 EB1[0:2]

``EF2[0:1]`` is layer 0 of an encoder, forward, for microbatch 2; ``EB2[0:2]`` its layers 1 and 0,
backward. ``EF2.1`` is the second encoder (``.0`` is left out). ``F`` and ``B`` are those of
``PipelineSchedule``. Every stage has whole encoders, so any can encode any microbatch; or a part of
their layers, where a microbatch goes through several stages.

    EF2 ─▶ F2 of the first chunk ─▶ … ─▶ B2 of the first chunk ─▶ EB2

Features travel to the stage of the first chunk, which exchanges them with other replicas and embeds
them; their gradients travel back. That is stage 0, unless encoders are cut over chunks before it
(``encoder_cut.py``). Optimus (section 4) places these actions in the bubbles of the backbone;
``spread_encoders`` has all of them before the pipeline fills and after it drains.
"""

import re
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from trainer_client.runtime.faults import LayoutError
from trainer_client.runtime.pipeline_schedule import (
    BACKWARD,
    FORWARD,
    Action,
    PipelineSchedule,
    walk,
)

ENCODE, RETURN = "EF", "EB"

_ACTION = re.compile(r"(EF|EB)(\d+)(?:\.(\d+))?\[(\d+):(\d+)\]")


@dataclass(frozen=True, slots=True)
class EncoderAction:
    """Layers ``first`` to ``end`` of an encoder for one microbatch: forward in this order, or
    backward from the last to the first."""

    kind: str
    microbatch: int
    encoder: int
    first: int
    end: int

    def __str__(self) -> str:
        encoder = f".{self.encoder}" if self.encoder else ""
        return f"{self.kind}{self.microbatch}{encoder}[{self.first}:{self.end}]"

    @staticmethod
    def parse(text: str) -> "EncoderAction":
        """Read what ``str`` gives. Raises LayoutError."""
        found = _ACTION.fullmatch(text)
        if found is None or int(found[4]) >= int(found[5]):
            raise LayoutError(
                f"{text!r} is no encoder action; write EF3[0:4] for layers 0 to 3 of microbatch 3, "
                "EB3[0:4] for their backward, EF3.1[0:4] for the second encoder"
            )
        return EncoderAction(found[1], *(int(word or 0) for word in found.groups()[1:]))


AnyAction = Action | EncoderAction


@dataclass(frozen=True, slots=True)
class Hop:
    """What goes from an encoder's layers to its next ones, or from its last layer to the first
    chunk: what ``layer`` gave forward, or its gradient (``kind`` EB)."""

    kind: str
    encoder: int
    microbatch: int
    layer: int

    def __str__(self) -> str:
        what = "features" if self.kind == ENCODE else "gradients"
        return f"{what} of encoder {self.encoder}, layer {self.layer}, microbatch {self.microbatch}"


@dataclass(frozen=True, kw_only=True, slots=True)
class EncoderMessage:
    """A hop from one stage to another. ``place``: between the action that gives it and the one that
    takes it, where turn t of ``BubbleSchedule.turns`` begins at 2t, ends at 2t + 1."""

    hop: Hop
    sender: int
    receiver: int
    place: int


@dataclass(frozen=True, kw_only=True)
class BubbleSchedule:
    """``actions[s]``: what stage s runs, in order.

    Raises LayoutError where the backbone's own actions are no ``PipelineSchedule``, where an
    encoder's are incomplete or out of order, or where the stages would wait for ever.
    """

    actions: tuple[tuple[AnyAction, ...], ...]

    def __post_init__(self) -> None:
        for microbatch, encoder in sorted(self._pieces):
            self._check_complete(microbatch, encoder)
        self._check_encoded()
        deque(self.turns, maxlen=0)  # raises where the stages wait for ever

    @cached_property
    def backbone(self) -> PipelineSchedule:
        """The chunks' own actions."""
        actions = tuple(
            tuple(action for action in of_stage if isinstance(action, Action))
            for of_stage in self.actions
        )
        every = [action for of_stage in actions for action in of_stage]
        chunks = (
            action.virtual_stage * self.stages + stage
            for stage, of_stage in enumerate(actions)
            for action in of_stage
        )
        return PipelineSchedule(
            virtual_stages=1 + max((action.virtual_stage for action in every), default=0),
            microbatches=1 + max((action.microbatch for action in every), default=-1),
            actions=actions,
            first_chunk=min(chunks, default=0),
        )

    @cached_property
    def home(self) -> int:
        """The stage of the first chunk, which takes in features."""
        return self.backbone.first_chunk % self.stages

    @property
    def stages(self) -> int:
        return len(self.actions)

    @cached_property
    def encoders(self) -> int:
        """How many encoders there are."""
        return 1 + max((encoder for _, encoder in self._pieces), default=-1)

    @cached_property
    def encoder_layers(self) -> tuple[int, ...]:
        """Layers of each encoder."""
        ends = [0] * self.encoders
        for (_, encoder), pieces in self._pieces.items():
            ends[encoder] = max(ends[encoder], *(action.end for _, action in pieces))
        return tuple(ends)

    def encodes(self, stage: int) -> bool:
        """Whether a stage runs any encoder layer."""
        return any(isinstance(action, EncoderAction) for action in self.actions[stage])

    def returns(self, encoder: int) -> bool:
        """Whether an encoder has a backward."""
        return any(
            action.kind == RETURN
            for (_, number), pieces in self._pieces.items()
            for _, action in pieces
            if number == encoder
        )

    def needs(self, stage: int, action: AnyAction) -> Iterator[tuple[int, AnyAction]]:
        """The stages and actions that must be over before this one begins, besides those before it
        on its stage."""
        if isinstance(action, Action):
            yield from self.backbone.needs(stage, action)
            if action.kind == FORWARD and self.is_first(stage, action):
                for encoder in range(self.encoders):
                    yield self._last(ENCODE, action.microbatch, encoder)
            return
        pieces = self._pieces[action.microbatch, action.encoder]
        place = pieces.index((stage, action))
        if place > 0 and pieces[place - 1][1].kind == action.kind:
            yield pieces[place - 1]
        if action.kind == RETURN:
            chunk = self.backbone.first_chunk // self.stages
            yield self.home, Action(BACKWARD, action.microbatch, chunk)
            yield self._last(ENCODE, action.microbatch, action.encoder)

    def is_first(self, stage: int, action: Action) -> bool:
        """Whether an action of a stage runs the first chunk."""
        return self.backbone.chunk(stage, action) == self.backbone.first_chunk

    def walk(self) -> Iterator[tuple[int, AnyAction]]:
        """All actions with their stages, in an order in which they can run."""
        return walk(self.actions, self.needs)

    @cached_property
    def turns(self) -> dict[tuple[int, AnyAction], int]:
        """Where each stage's actions stand in that order."""
        return {step: turn for turn, step in enumerate(self.walk())}

    def runs(self, kind: str, microbatch: int, encoder: int, layer: int) -> bool:
        """Whether any stage runs a layer, forward or backward."""
        return any(
            action.kind == kind and action.first <= layer < action.end
            for _, action in self._pieces[microbatch, encoder]
        )

    @cached_property
    def messages(self) -> tuple[EncoderMessage, ...]:
        """What stages send one another of encoders, in an order in which all of it may share one
        communicator (``encoder_messages.py``). What a stage keeps for itself is no message."""
        given: dict[Hop, tuple[int, int]] = {}  # stage, and where its action ends
        taken: dict[Hop, tuple[int, int]] = {}  # stage, and where the action before begins
        for stage, actions in enumerate(self.actions):
            before = 0
            for action in actions:
                begin = 2 * self.turns[stage, action]
                for takes, hop in self._hops_of(stage, action):
                    if takes:
                        taken[hop] = stage, before
                    else:
                        given[hop] = stage, begin + 1
                before = begin
        messages = []
        for hop, (sender, place) in given.items():
            receiver, ahead = taken[hop]
            if hop.kind == ENCODE:
                place = max(place, ahead)
            if sender != receiver:
                messages.append(
                    EncoderMessage(hop=hop, sender=sender, receiver=receiver, place=place)
                )
        return tuple(sorted(messages, key=lambda message: message.place))

    def _hops_of(self, stage: int, action: AnyAction) -> Iterator[tuple[bool, Hop]]:
        """What an action gives or takes, and whether it takes it."""
        if isinstance(action, Action):
            if self.is_first(stage, action):
                for encoder, layers in enumerate(self.encoder_layers):
                    if action.kind == FORWARD:
                        yield True, Hop(ENCODE, encoder, action.microbatch, layers - 1)
                    elif self.returns(encoder):
                        yield False, Hop(RETURN, encoder, action.microbatch, layers - 1)
            return
        key = action.encoder, action.microbatch
        if action.kind == ENCODE:
            if action.first > 0:
                yield True, Hop(ENCODE, *key, action.first - 1)
            yield False, Hop(ENCODE, *key, action.end - 1)
            return
        yield True, Hop(RETURN, *key, action.end - 1)
        if self.runs(RETURN, action.microbatch, action.encoder, action.first - 1):
            yield False, Hop(RETURN, *key, action.first - 1)

    def _last(self, kind: str, microbatch: int, encoder: int) -> tuple[int, EncoderAction]:
        pieces = self._pieces[microbatch, encoder]
        return [piece for piece in pieces if piece[1].kind == kind][-1]

    @cached_property
    def _pieces(self) -> dict[tuple[int, int], list[tuple[int, EncoderAction]]]:
        """(microbatch, encoder) → its actions with their stages: forwards from the first layer on,
        then backwards from the last."""
        pieces: dict[tuple[int, int], list[tuple[int, EncoderAction]]] = {}
        for stage, actions in enumerate(self.actions):
            for action in actions:
                if isinstance(action, EncoderAction):
                    key = action.microbatch, action.encoder
                    pieces.setdefault(key, []).append((stage, action))
        for found in pieces.values():
            found.sort(key=lambda piece: _layer_order(piece[1]))
        return pieces

    def _check_complete(self, microbatch: int, encoder: int) -> None:
        layers = self.encoder_layers[encoder]
        pieces = [action for _, action in self._pieces[microbatch, encoder]]
        forward = [action for action in pieces if action.kind == ENCODE]
        backward = [action for action in pieces if action.kind == RETURN]
        ends = [0, *(action.end for action in forward)]
        begins = [layers, *(action.first for action in backward)]
        whole = [action.first for action in forward] == ends[:-1] and ends[-1] == layers
        back = [action.end for action in backward] == begins[:-1]
        if not (whole and back and bool(backward) == self.returns(encoder)):
            raise LayoutError(
                f"microbatch {microbatch} runs {' '.join(map(str, pieces))} of encoder {encoder}; "
                f"forward it needs each of the {layers} layers once, and where the encoder trains, "
                "backward from the last layer down to the first that trains"
            )
        if not 0 <= microbatch < self.backbone.microbatches:
            raise LayoutError(
                f"encoder {encoder} has a microbatch {microbatch}, and the backbone has "
                f"{self.backbone.microbatches}"
            )

    def _check_encoded(self) -> None:
        missing = [
            f"microbatch {microbatch} of encoder {encoder}"
            for microbatch in range(self.backbone.microbatches)
            for encoder in range(self.encoders)
            if (microbatch, encoder) not in self._pieces
        ]
        if missing:
            raise LayoutError(f"no stage encodes {missing[0]}; every encoder needs all of them")

    def __str__(self) -> str:
        return "\n".join(
            f"{stage}: {' '.join(map(str, actions))}" for stage, actions in enumerate(self.actions)
        )

    @staticmethod
    def parse(text: str) -> "BubbleSchedule":
        """Read what ``str`` gives. Raises LayoutError."""
        lines = [line.partition(":") for line in text.strip().splitlines()]
        if [number.strip() for number, _, _ in lines] != [str(s) for s in range(len(lines))]:
            raise LayoutError(f"a schedule has one line a stage, '0: F0 B0', '1: ...': {text!r}")
        return BubbleSchedule(
            actions=tuple(tuple(map(_parsed, rest.split())) for _, _, rest in lines)
        )


def spread_encoders(
    backbone: PipelineSchedule,
    layers: Sequence[int],
    *,
    trains: Sequence[bool],
    work: Sequence[float] | None = None,
) -> BubbleSchedule:
    """Encoders over all stages, before the pipeline fills and after it drains.

    ``layers``, ``trains``: of each encoder. ``work`` of each microbatch is shared out to the stage
    that has least, the largest first; without it, microbatch m is encoded on stage m mod p.
    """
    before: list[list[AnyAction]] = [[] for _ in range(backbone.stages)]
    after: list[list[AnyAction]] = [[] for _ in range(backbone.stages)]
    for microbatch, stage in enumerate(_shared_out(backbone, work)):
        for encoder, count in enumerate(layers):
            before[stage].append(EncoderAction(ENCODE, microbatch, encoder, 0, count))
            if trains[encoder]:
                after[stage].append(EncoderAction(RETURN, microbatch, encoder, 0, count))
    return BubbleSchedule(
        actions=tuple(
            (*first, *middle, *last)
            for first, middle, last in zip(before, backbone.actions, after, strict=True)
        )
    )


def _shared_out(backbone: PipelineSchedule, work: Sequence[float] | None) -> list[int]:
    """The stage that encodes each microbatch."""
    stages = [microbatch % backbone.stages for microbatch in range(backbone.microbatches)]
    if work is None:
        return stages
    held = [0.0] * backbone.stages
    for microbatch in sorted(range(len(stages)), key=lambda each: -work[each]):
        stages[microbatch] = min(range(backbone.stages), key=held.__getitem__)
        held[stages[microbatch]] += work[microbatch]
    return stages


def _layer_order(action: EncoderAction) -> tuple[bool, int]:
    forward = action.kind == ENCODE
    return not forward, action.first if forward else -action.end


def _parsed(text: str) -> AnyAction:
    return EncoderAction.parse(text) if text.startswith("E") else Action.parse(text)
