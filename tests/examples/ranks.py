"""One rank of a trainer in a forked process, as torchrun would start it but without the start."""

import contextlib
import os
import runpy
import sys
from pathlib import Path


def main(module: str, arguments: list[str], environment: dict[str, str], said: Path) -> None:
    """Run a module as a script; what it prints goes to `said`."""
    os.environ.update(environment)
    sys.argv = [module, *arguments]
    with said.open("w") as sink, contextlib.redirect_stdout(sink), contextlib.redirect_stderr(sink):
        runpy.run_module(module, run_name="__main__", alter_sys=True)
