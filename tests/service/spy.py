"""A team's own code that looks for secrets wherever its process can: all of its memory."""

import os
import re
from pathlib import Path

ON = "on"


class Spy:
    """Passes samples on. While there is a file ON in `out`, it notes there how often each secret
    is in its memory; `secrets` has them in two halves, so that it finds none of its own."""

    version = 1

    def __init__(self, out: str, secrets: dict[str, list[str]]) -> None:
        self.out = Path(out)
        self.secrets = {name: [half.encode() for half in two] for name, two in secrets.items()}
        self.look("builds")

    def prepare(self, sample):
        self.look("prepares")
        return sample

    def look(self, when: str) -> None:
        mark = self.out / f"{when}.{os.getpid()}"
        if not (self.out / ON).exists() or mark.exists():
            return
        mark.touch()
        found = {name: found_in_memory(*two) for name, two in self.secrets.items()}
        mark.write_text(repr(found))


def found_in_memory(first: bytes, second: bytes) -> int:
    """How often both halves stand behind each other in this process's memory."""
    found = 0
    with open("/proc/self/maps") as maps, open("/proc/self/mem", "rb", buffering=0) as memory:
        for line in maps.read().splitlines():
            span = re.match(r"([0-9a-f]+)-([0-9a-f]+) rw", line)
            if span is None:
                continue
            start, end = (int(each, 16) for each in span.groups())
            try:
                memory.seek(start)
                data = memory.read(end - start)
            except OSError:
                continue
            for at in re.finditer(re.escape(first), data):
                found += data[at.end() : at.end() + len(second)] == second
    return found
