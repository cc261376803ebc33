"""Lays a record out under the keys that decoding reads, as the source's `columns` say, and reads
its loss weight."""

from collections.abc import Callable, Mapping

from dataservice.core.errors import SampleError
from dataservice.core.job import SourceSpec
from dataservice.core.quoting import quoted
from dataservice.core.sample import MAX_LOSS_WEIGHT, PART_OPTIONS

TURNS = ("messages", "conversations")
"""The keys under which a record has the turns of a conversation."""
_KEY_OF_ROLE = {"conversation": "conversations"}
# Keys besides the text that a conversation may have.
_BESIDE = ("system", "tools")


def laid_out(record: Mapping[str, object], spec: SourceSpec) -> dict[str, object]:
    """The record as it is; or, where `columns` names its text, what they name and nothing else.
    Parts of messages are without the options that the source ignores.

    Raises:
        SampleError: the record lacks such a column.
    """
    chosen = spec.columns.texts
    ignored = PART_OPTIONS & set(spec.ignore)
    if not chosen:
        return _without(dict(record), ignored)
    laid = {key: record[key] for key in _BESIDE if key in record}
    for role, column in chosen.items():
        value = value_at(record, column)
        if value is not None:
            laid[_KEY_OF_ROLE.get(role, role)] = value
        elif role != "system":
            raise SampleError(
                f"columns.{role} of the source is {column!r}; the record has nothing there. Its "
                f"keys are {quoted(sorted(record))}. Correct it, or leave the sample out."
            )
    return _without(laid, ignored)


def _without(record: dict[str, object], options: frozenset[str]) -> dict[str, object]:
    def change(part: Mapping[str, object]) -> Mapping[str, object]:
        return {key: value for key, value in part.items() if key not in options}

    for key in TURNS if options else ():
        if isinstance(turns := record.get(key), list):
            record[key] = [with_parts(turn, change) for turn in turns]
    return record


def with_parts(
    turn: object, change: Callable[[Mapping[str, object]], Mapping[str, object]]
) -> object:
    """A turn whose content is a list, each object in that changed; any other as it is."""
    if not isinstance(turn, Mapping) or not isinstance(turn.get("content"), list):
        return turn
    parts = [change(part) if isinstance(part, Mapping) else part for part in turn["content"]]
    return {**turn, "content": parts}


def loss_weight_of(record: Mapping[str, object], spec: SourceSpec) -> float:
    """The record's own loss weight; 1 where the source names none, or the record lacks it.

    Raises:
        SampleError: it is no number from 0 to MAX_LOSS_WEIGHT.
    """
    column = spec.columns.loss_weight
    value = value_at(record, column) if column else None
    if value is None:
        return 1.0
    # True is an int, and means something else.
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _no_weight(column, value)
    if not 0 <= value <= MAX_LOSS_WEIGHT:  # nan neither
        raise _no_weight(column, value)
    return float(value)


def _no_weight(column: str, value: object) -> SampleError:
    return SampleError(
        f"columns.loss_weight of the source is {column!r}, where the record has {quoted(value)}; a "
        f"loss weight is a number from 0 to {MAX_LOSS_WEIGHT:,.0f}. Correct it, or remove it, "
        "which weighs 1."
    )


def value_at(record: Mapping[str, object], path: str) -> object:
    """The value under a key, or under a dotted path of keys; None where there is none."""
    if path in record:
        return record[path]
    value: object = record
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value
