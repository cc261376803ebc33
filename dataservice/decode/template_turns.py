"""Tells which text of a rendered chat template belongs to which turn.

The template is compiled a second time, with marks: each iteration of a loop over turns writes one
before its text and one behind it. Whatever the template does with a turn (strips it, drops its
thoughts, joins it with others), the text between the marks is that turn's. In nested loops, text
belongs to the innermost turn.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from jinja2 import nodes
from jinja2.environment import Template
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from dataservice.decode.marks import LOSS_CLOSE, LOSS_OPEN

# Texts of samples cannot contain the marks of loss, and a template that is traced writes none.
_MARK = re.compile(f"{LOSS_OPEN}([0-9]{{1,9}}){LOSS_OPEN}|{LOSS_CLOSE}")
_OPEN, _CLOSE, _FIRST, _KEPT = "turn_opens", "turn_closes", "turn_begins", "turn_kept"


class Turn(dict[str, object]):
    """A turn as templates see it, and its place, which counts from 0."""

    # Private, since templates read `turn.place` as the turn's key of that name.
    __slots__ = ("_place",)

    def __init__(self, values: Mapping[str, object], place: int) -> None:
        super().__init__(values)
        self._place = place


def place_of(turn: Turn) -> int:
    """The place of a turn in its conversation."""
    return turn._place


@dataclass(frozen=True, slots=True)
class Stretch:
    """Characters `start` to `end` of a text, written by one iteration (`visit`) over a turn."""

    turn: int
    visit: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class TracedText:
    """A rendered text and the stretches that turns have written, in order."""

    text: str
    stretches: tuple[Stretch, ...]

    def of(self, turn: int) -> tuple[Stretch, ...] | None:
        """The stretches of a turn; none if it has written only white space, and None if several
        iterations have written more than that."""
        own = [stretch for stretch in self.stretches if stretch.turn == turn]
        inked = {one.visit for one in own if self.text[one.start : one.end].strip()}
        if len(inked) > 1:
            return None
        return tuple(one for one in own if one.visit in inked)

    def split(self, turns: frozenset[int]) -> tuple[str, str]:
        """The text that these turns have written, and all other text."""
        own, other, done = [], [], 0
        for one in self.stretches:
            if one.turn in turns:
                other.append(self.text[done : one.start])
                own.append(self.text[one.start : one.end])
                done = one.end
        return "".join(own), "".join([*other, self.text[done:]])

    @property
    def end_of_turns(self) -> int:
        """Where the text of the last turn ends."""
        return self.stretches[-1].end if self.stretches else 0


def compile_traced(environment: ImmutableSandboxedEnvironment, source: str) -> Template:
    """The template with marks around the text of turns. `environment` gets filters for them, so it
    should serve no other template."""
    environment.filters |= {_OPEN: _opening, _CLOSE: _closing, _FIRST: _beginning, _KEPT: _kept}
    marked = _Marker().visit(environment.parse(source))
    code = environment.compile(marked)
    return Template.from_code(environment, code, environment.make_globals(None))


def read_traced(marked: str) -> TracedText | None:
    """The text without its marks; None when they do not pair, as when a filter has cut them."""
    texts: list[str] = []
    stretches: list[Stretch] = []
    inside: list[tuple[int, int]] = []  # turn and visit, the innermost last
    length = visits = 0
    for text, mark in _cut(marked):
        if text:
            texts.append(text)
            if inside:
                stretches.append(Stretch(*inside[-1], length, length + len(text)))
            length += len(text)
        if mark is None:
            continue
        if mark[1] is not None:
            inside.append((int(mark[1]), visits))
            visits += 1
        elif inside:
            inside.pop()
        else:
            return None
    whole = "".join(texts)
    if inside or LOSS_OPEN in whole:
        return None
    return TracedText(whole, tuple(stretches))


def _opening(value: object) -> str:
    return f"{LOSS_OPEN}{place_of(value)}{LOSS_OPEN}" if isinstance(value, Turn) else ""


def _closing(value: object) -> str:
    return LOSS_CLOSE if isinstance(value, Turn) else ""


def _beginning(turn: object, value: object) -> str:
    return "" if isinstance(turn, Turn) else _opening(value)


def _kept(turn: object, value: object) -> object:
    return turn if isinstance(turn, Turn) else value


def _cut(marked: str) -> Iterator[tuple[str, re.Match[str] | None]]:
    """Each mark with the text before it, and the text behind the last."""
    done = 0
    for mark in _MARK.finditer(marked):
        yield marked[done : mark.start()], mark
        done = mark.end()
    yield marked[done:], None


class _Marker(NodeTransformer):
    """Writes marks into the loops of a template: around the text of each iteration over turns, and
    from where an iteration over numbers sets a variable to a turn."""

    def __init__(self) -> None:
        self._count = 0
        self._loops: list[str] = []  # the variable for each open loop's turn, the innermost last

    def visit_For(self, node: nodes.For) -> nodes.For:
        """A loop, of whatever."""
        self._count += 1
        # Of its own, since the template may give the loop's variable another value.
        turn = f"turn_of_loop_{self._count}"
        value: nodes.Expr = nodes.Const(None)
        if isinstance(node.target, nodes.Name):
            value = nodes.Name(node.target.name, "load")
        self._loops.append(turn)
        body = self._visited(node.body)
        self._loops.pop()
        body = [_set(turn, value), _written(turn, _OPEN), *body, _written(turn, _CLOSE)]
        node.body = [child.set_lineno(node.lineno) for child in body]
        node.else_ = self._visited(node.else_)
        return node

    def visit_Assign(self, node: nodes.Assign) -> list[nodes.Node]:
        """A variable that may be set to a turn."""
        if not self._loops or not isinstance(node.target, nodes.Name):
            return [node]
        turn, value = self._loops[-1], nodes.Name(node.target.name, "load")
        begins = _filtered(turn, _FIRST, [value])
        marked = [node, nodes.Output([begins]), _set(turn, _filtered(turn, _KEPT, [value]))]
        return [child.set_lineno(node.lineno) for child in marked]

    def visit_Macro(self, node: nodes.Macro) -> nodes.Macro:
        """A macro, which sees no variables of the loop around it."""
        outside, self._loops = self._loops, []
        node.body = self._visited(node.body)
        self._loops = outside
        return node

    def visit_Continue(self, node: nodes.Continue) -> list[nodes.Node]:
        """Leaves an iteration: its closing mark comes before."""
        return [_written(self._loops[-1], _CLOSE), node] if self._loops else [node]

    visit_Break = visit_Continue

    def _visited(self, body: list[nodes.Node]) -> list[nodes.Node]:
        return [new for child in body for new in self.visit_list(child)]


def _filtered(turn: str, name: str, arguments: list[nodes.Expr] | None = None) -> nodes.Filter:
    return nodes.Filter(nodes.Name(turn, "load"), name, arguments or [], [], None, None)


def _written(turn: str, mark: str) -> nodes.Output:
    return nodes.Output([_filtered(turn, mark)])


def _set(turn: str, value: nodes.Expr) -> nodes.Assign:
    return nodes.Assign(nodes.Name(turn, "store"), value)
