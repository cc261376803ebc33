"""The port of Ray's head: whether anybody listens there.

Ray itself asks for minutes where nobody does, in a thread that nothing ends, and where its head is
lost it ends the process that has joined it with a line of its own.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

PAUSE_S = 1.0

log = logging.getLogger(__name__)


@dataclass(kw_only=True, slots=True)
class RayHead:
    """A Ray by the `address` that it is joined at, None for one of our own. `silence` is what was
    met at that port last, empty where somebody listens, and where the address names no port."""

    address: str | None
    silence: str = ""

    @property
    def where(self) -> str:
        """Its place in words."""
        return "on this machine" if self.address is None else f"at {self.address}"

    async def until_it_listens(self) -> None:
        """Wait until somebody listens."""
        while True:
            if await self._heard():
                return
            await asyncio.sleep(PAUSE_S)

    async def watch(self, every_s: float, lost: Callable[[], None]) -> None:
        """Call `lost` each time that nobody listens any more, until cancelled."""
        while True:
            await asyncio.sleep(every_s)
            before = self.silence
            if await self._heard():
                if before:
                    log.info("Ray %s answers again", self.where)
            elif not before:
                lost()

    async def _heard(self) -> bool:
        address = self.address or ""
        host, _, port = address.rpartition(":")
        if "://" in address or not port.isdigit():
            return True
        try:
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
        except OSError as error:
            self.silence = f": {error}"
            return False
        writer.close()
        self.silence = ""
        return True
