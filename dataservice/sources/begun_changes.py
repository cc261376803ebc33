"""The changes of a mixture that are in force at a place, as a cursor names them.

Each is NAME@EPOCH:POSITION, where it began; they are joined by commas, in the order in which they
began.
"""

from dataservice.core.errors import CursorMismatchError


def entries(begun: str) -> list[tuple[str, int, int]]:
    """Raises CursorMismatchError where it was not written here."""
    try:
        return [_parsed(each) for each in begun.split(",") if each]
    except ValueError as error:
        raise CursorMismatchError(
            f"the cursor's changes of the mixture are {begun[:80]!r}; each is NAME@EPOCH:POSITION. "
            "Load the state_dict that ShardDataset gave."
        ) from error


def _parsed(entry: str) -> tuple[str, int, int]:
    name, _, place = entry.partition("@")
    epoch, _, position = place.partition(":")
    return name, int(epoch), int(position)


def entry_of(parsed: tuple[str, int, int]) -> str:
    name, epoch, position = parsed
    return f"{name}@{epoch}:{position}"


def names_in(begun: str) -> set[str]:
    return {name for name, _, _ in entries(begun)}


def with_change(begun: str, name: str, epoch: int, position: int) -> str:
    entry = entry_of((name, epoch, position))
    return f"{begun},{entry}" if begun else entry
