"""How far a job has consumed its mixture."""

import hashlib
import json
from dataclasses import asdict, dataclass, fields
from functools import lru_cache

from dataservice.core.errors import CursorMismatchError
from dataservice.core.job import LAST_STEP

# Version 2 added the window and the digest, version 3 the changes of the mixture.
CURSOR_VERSION = 3
DIGEST_BYTES = 8
_encode = json.JSONEncoder(sort_keys=True).encode  # `json.dumps` would make one for each text


@dataclass(frozen=True, kw_only=True, slots=True)
class Cursor:
    """The next step to plan, and where its window of steps starts in the mixture.

    `epoch` and `position` (samples already drawn in that epoch) say where the current
    *window* begins; `step_in_window` counts the steps of that window already consumed.
    `order` identifies the order of samples that these places are in: another index, seed or weights
    give another order. `window` says what split the window into its steps; empty at the beginning
    of a window, where nothing is split yet. `begun` names the changes of the mixture that are in
    force, and where each began. This is all that a checkpoint has to keep.
    """

    step: int = 0
    epoch: int = 0
    position: int = 0
    step_in_window: int = 0
    order: str = ""
    window: str = ""
    begun: str = ""

    @property
    def at_beginning(self) -> bool:
        """Nothing is consumed yet."""
        return not (self.step or self.epoch or self.position or self.step_in_window)

    def to_json(self) -> str:
        """The form stored in checkpoints and the ledger, with a digest of its fields. The digest
        has no key: it detects accidents and edits, not forgery."""
        return _written(self)

    @staticmethod
    def from_json(text: str) -> "Cursor":
        """Read `to_json`'s form. Raises CursorMismatchError where the version or the shape is
        another, or a field is not what was written."""
        try:
            plain = json.loads(text)
            version = plain["version"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise CursorMismatchError(
                f"not a cursor: {text[:80]!r}. Load the state_dict that ShardDataset gave."
            ) from error
        if version != CURSOR_VERSION:
            raise CursorMismatchError(
                f"the checkpoint's cursor has version {str(version)[:20]}; this service reads "
                f"version {CURSOR_VERSION}. Resume with the release that wrote it."
            )
        try:
            return _checked(plain)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise CursorMismatchError(
                f"the checkpoint's cursor {text[:120]!r} has other fields, or other values, than "
                f"{', '.join(field.name for field in fields(Cursor))}, digest. Load the "
                "state_dict that ShardDataset gave."
            ) from error


@lru_cache(maxsize=1024)
def _written(cursor: Cursor) -> str:
    # Of each step it is asked for thrice: behind the step, in the ledger, and with its successor.
    plain = {"version": CURSOR_VERSION, **asdict(cursor)}
    return _encode({**plain, "digest": _digest(plain)})


def _checked(plain: dict[str, object]) -> Cursor:
    """Raises KeyError, TypeError or ValueError where `to_json` never writes this, and
    CursorMismatchError where only the digest is wrong."""
    given = str(plain.pop("digest"))
    cursor = Cursor(**{name: value for name, value in plain.items() if name != "version"})  # type: ignore[arg-type]
    for field in fields(cursor):
        value = getattr(cursor, field.name)
        if type(value) is not field.type or (field.type is int and not 0 <= value <= LAST_STEP):
            raise ValueError(f"{field.name} is {value!r}")
    digest = _digest(plain)
    if digest != given:
        raise CursorMismatchError(
            f"the checkpoint's cursor at step {cursor.step} was changed after it was saved: its "
            f"digest is {given[:32]!r}, that of its fields {digest!r}. A position that was "
            "edited or damaged would lose some samples and repeat others; restore the "
            "checkpoint, or take another."
        )
    return cursor


def _digest(plain: dict[str, object]) -> str:
    text = _encode(plain)
    return hashlib.blake2b(text.encode(), digest_size=DIGEST_BYTES).hexdigest()
