"""Jinja as Hugging Face runs chat templates.

Sandboxed, `trim_blocks` and `lstrip_blocks`, with `raise_exception`, `strftime_now`, `tojson`, loop
controls and `{% generation %}`. There is one difference: `strftime_now` gives a fixed date, since
otherwise a sample's length would change overnight.
"""

import json
from collections.abc import MutableMapping
from datetime import date, datetime, time
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from dataservice.core.quoting import cut
from dataservice.decode.marks import LOSS_CLOSE, LOSS_OPEN


class GenerationTag(Extension):
    """`{% generation %} … {% endgeneration %}`: the text that the model learns to generate."""

    tags = {"generation"}  # noqa: RUF012 - the type that the base class gives it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The tag's body, with a mark at each end."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        ends = [
            nodes.Output([nodes.TemplateData(mark)]).set_lineno(line)
            for mark in (LOSS_OPEN, LOSS_CLOSE)
        ]
        return [ends[0], *body, ends[1]]


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, whose global names stay as they are once it has templates. Each rendering copies
    them, and Jinja's own chain of two mappings takes as long for that as for a short chat."""

    def make_globals(self, d: MutableMapping[str, Any] | None) -> MutableMapping[str, Any]:
        return {**self.globals, **(d or {})}


def environment(today: date) -> ImmutableSandboxedEnvironment:
    """Where templates run, to which it is always `today`."""
    made = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols]
    )
    now = datetime.combine(today, time())
    made.globals["raise_exception"] = _raise_exception
    made.globals["strftime_now"] = now.strftime
    made.filters["tojson"] = _tojson
    return made


def _raise_exception(message: object) -> NoReturn:
    # A template may put a whole sample into the message, so it is cut to a readable length.
    raise TemplateError(cut(message))


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the HTML escapes of Jinja's own filter, which templates for models do not
    want."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
