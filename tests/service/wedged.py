"""`dataservice`, parts of which hang while a file of their name lies in $WEDGES: what threads and
the event loop do when something beneath them does not come back."""

import asyncio
import os
import time
from pathlib import Path
from typing import Any

from dataservice.cli.main import main
from dataservice.engine import coordinator, records
from dataservice.state.sqlite import SqliteStateStore

STORE, PLANNING, LOOP = "store", "planning", "loop"


def hang(what: str) -> None:
    """Blocks this thread while the file is there; another with .hangs tells that one is."""
    file = Path(os.environ["WEDGES"]) / what
    while file.exists():
        file.with_suffix(".hangs").touch()
        time.sleep(0.02)


def install() -> None:
    """One question to the store, the planning of a step, and a task of the event loop."""
    plan_step, quarantine = records.plan_step, SqliteStateStore.quarantine
    start = coordinator.Coordinator.start

    def plan_late(*args: Any) -> Any:
        hang(PLANNING)
        return plan_step(*args)

    def read_late(self: Any, *asked: Any, **page: Any) -> Any:
        with self._turn:  # as where the disk does not answer
            hang(STORE)
        return quarantine(self, *asked, **page)

    async def hang_again_and_again() -> None:
        while True:
            hang(LOOP)
            await asyncio.sleep(0.02)

    async def started(self: Any) -> None:
        self.hanging = asyncio.create_task(hang_again_and_again())
        await start(self)

    records.plan_step = plan_late
    SqliteStateStore.quarantine = read_late  # type: ignore[method-assign]
    coordinator.Coordinator.start = started  # type: ignore[method-assign]


if __name__ == "__main__":
    install()
    main()
