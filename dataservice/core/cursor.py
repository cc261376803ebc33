"""How far a job has consumed its mixture."""

import json
from dataclasses import asdict, dataclass

from dataservice.core.errors import CursorMismatchError

CURSOR_VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Cursor:
    """The next step to plan, and where its window of steps starts in the mixture.

    `epoch` and `position` (samples already drawn in that epoch) are where the current
    *window* begins; `step_in_window` counts the steps of that window already consumed.
    `order` names the order of samples that these places are in: another index, seed or weights
    give another. Small, and all that a checkpoint has to keep.
    """

    step: int = 0
    epoch: int = 0
    position: int = 0
    step_in_window: int = 0
    order: str = ""

    def to_json(self) -> str:
        """The form stored in checkpoints and the ledger."""
        return json.dumps({"version": CURSOR_VERSION, **asdict(self)}, sort_keys=True)

    @staticmethod
    def from_json(text: str) -> "Cursor":
        """Read `to_json`'s form. Raises CursorMismatchError on another version or shape."""
        try:
            fields = json.loads(text)
            version = fields.pop("version")
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
            raise CursorMismatchError(
                f"not a cursor: {text[:80]!r}. Load the state_dict that ShardDataset gave."
            ) from error
        if version != CURSOR_VERSION:
            raise CursorMismatchError(
                f"the checkpoint's cursor has version {version}; this service reads version "
                f"{CURSOR_VERSION}. Resume with the release that wrote it."
            )
        try:
            order = str(fields.pop("order"))
            counts = {name: int(value) for name, value in fields.items()}
            if not all(0 <= count < 2**63 for count in counts.values()):
                raise ValueError("a count out of range")
            return Cursor(order=order, **counts)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise CursorMismatchError(
                f"the checkpoint's cursor {text[:120]!r} has other fields, or other values, than "
                "step, epoch, position, step_in_window, order. Load the state_dict that "
                "ShardDataset gave."
            ) from error
