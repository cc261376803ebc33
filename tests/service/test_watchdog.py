"""What the watchdog says of a sign that is not seen."""

import threading
import time
from collections.abc import Callable

from dataservice.operate.watchdog import Sign, Trouble

LIMIT_S = 0.2


def test_a_look_that_hangs_after_one_that_failed_is_told_as_hanging() -> None:
    let_go = threading.Event()
    looks: list[None] = []

    def look() -> None:
        looks.append(None)
        if len(looks) == 1:
            raise OSError("database is locked")
        let_go.wait()

    sign = Sign("the state store", look, every_s=0.01)
    try:
        trouble = told(sign, lambda trouble: trouble.hangs)
        assert trouble.sentence.startswith("the state store has not answered")
        assert trouble.detail == ""
    finally:
        sign.close()
        let_go.set()


def test_looks_that_fail_again_and_again_are_told_with_their_reason() -> None:
    def look() -> None:
        raise OSError("database is locked")

    sign = Sign("the state store", look, every_s=0.01)
    try:
        trouble = told(sign, lambda trouble: not trouble.hangs)
        assert trouble.sentence.startswith("the state store has failed")
        assert trouble.detail == ": database is locked"
    finally:
        sign.close()


def told(sign: Sign, wanted: Callable[[Trouble], bool]) -> Trouble:
    """What the sign tells once it tells what is wanted, or after some seconds."""
    deadline_s = time.monotonic() + 5.0
    while True:
        trouble = sign.trouble(LIMIT_S)
        if trouble is not None and (wanted(trouble) or time.monotonic() > deadline_s):
            return trouble
        time.sleep(0.01)
