"""What a trainer is told once: by a warning with a category of its own, and in the log.

    ClientWarning (UserWarning)
    ├── MediaNotRead        images or sounds came to a rank that trains without them
    ├── UncommittedSteps    a saved state may not agree with what the loop has trained
    └── SlowAttention       a GPU computes attention with the slow, plain kernel

These are no reason to stop, but the loss would not show them. Turn a warning off, or into an error,
with `warnings.filterwarnings`.
"""

import logging
import sys
import warnings
from types import FrameType

log = logging.getLogger("trainer_client")


class ClientWarning(UserWarning):
    """Base of every warning of the client."""


class MediaNotRead(ClientWarning):
    """Encoder items came to this rank, and steps were trained without reading them."""


class UncommittedSteps(ClientWarning):
    """A state was saved where it is not certain which steps were trained."""


class SlowAttention(ClientWarning):
    """Attention on a GPU is computed by the plain kernel."""


def tell(category: type[ClientWarning], text: str) -> None:
    """Log `text`, and warn with it; the warning points at the line outside this package that led
    here. The caller sees to it that this happens once."""
    if log.hasHandlers():  # without one, logging prints what the warning prints too
        log.warning(text)
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and _ours(frame):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, category, stacklevel=level)


def _ours(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).partition(".")[0] == "trainer_client"
