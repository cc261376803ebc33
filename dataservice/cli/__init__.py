"""The command `dataservice`.

Its modules take most of a second to load, before anything of it can catch ^C: that ends the process
all the same by the signal, which a shell reports as 130, and with nothing more to say.
"""

import sys
from types import TracebackType

_tell = sys.excepthook


def _tell_but_interrupts(
    kind: type[BaseException], error: BaseException, where: TracebackType | None
) -> None:
    if not issubclass(kind, KeyboardInterrupt):
        _tell(kind, error, where)


sys.excepthook = _tell_but_interrupts
