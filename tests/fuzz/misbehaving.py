"""What no decoder should do, so that the lab can be seen to notice."""

import os
import signal
from collections.abc import Callable


def misbehaving(_setting: None) -> Callable[[str], str | None]:
    def attempt(case: str) -> str | None:
        if case == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        while case == "hang":
            pass
        if case == "hoard":
            bytearray(200 * 2**20)
        return None

    return attempt
