"""`dataservice ARGUMENTS` in a process of its own, without paying for its imports each time.

A server process imports the command once and forks for every call, before any thread of gRPC
or of a service exists. The child is the command: its own output, exit status and traceback.
What was imported is frozen, or the end of every child would walk all of it.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_SERVER = """
import atexit, gc, json, os, sys, threading
import dataservice.app, dataservice.engine.coordinator, dataservice.jobs.calibrate
import dataservice.jobs.opener  # what commands load when they need it
import dataservice.cli.main as command

def become(order):
    os.chdir(order["cwd"])
    os.environ.update(order["env"])
    sys.path[:0] = order["path"]
    for number, name in ((0, os.devnull), (1, order["out"]), (2, order["err"])):
        os.dup2(os.open(name, os.O_RDWR), number)
    sys.argv = ["dataservice", *order["arguments"]]
    try:
        command.main()
    except SystemExit as done:
        if done.code is not None and not isinstance(done.code, int):
            print(done.code, file=sys.stderr)
            return 1
        return done.code or 0
    return 0

def end(status):
    # As the interpreter does, but for what C++ has: a fork has objects of threads that only its
    # parent has, and ends by SIGABRT where one is destroyed.
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)

gc.freeze()
for line in sys.stdin:
    child = os.fork()
    if not child:
        end(become(json.loads(line)))
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(status, flush=True)
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Done:
    """How a command ended. `said` is both of its outputs, line breaks and spaces run together."""

    code: int
    out: str
    err: str

    @property
    def said(self) -> str:
        return " ".join(f"{self.out} {self.err}".split())


@dataclass
class CommandLine:
    """The command, ready to run. `service` is what --service defaults to, if set."""

    server: "subprocess.Popen[str]"
    home: Path
    service: str = ""

    def __call__(self, *arguments: str | Path, path: Path | None = None) -> Done:
        """Run it to its end; `path` is put on the module search path."""
        out, err = self.home / "out", self.home / "err"
        for file in (out, err):
            file.write_text("")
        env = {"DATASERVICE_ADDRESS": self.service} if self.service else {}
        order = {
            "arguments": [str(each) for each in arguments],
            "cwd": os.getcwd(),
            "env": {**env, "PYTHONPATH": str(path or "")},
            "path": [str(path)] if path else [],
            "out": str(out),
            "err": str(err),
        }
        assert self.server.stdin is not None
        assert self.server.stdout is not None
        self.server.stdin.write(json.dumps(order) + "\n")
        self.server.stdin.flush()
        code = int(self.server.stdout.readline())
        return Done(code=code, out=out.read_text(), err=err.read_text())

    def ok(self, *arguments: str | Path, path: Path | None = None) -> Done:
        """Run a command that must succeed."""
        done = self(*arguments, path=path)
        assert done.code == 0, done.said
        return done

    def refused(self, *arguments: str | Path, path: Path | None = None, code: int = 1) -> str:
        """Run a command that must fail with a sentence; what it said."""
        done = self(*arguments, path=path)
        assert done.code == code, done.said
        assert "Traceback" not in done.said
        return done.said


def says(text: object, *parts: object) -> None:
    """The message holds each of these."""
    missing = [str(part) for part in parts if str(part) not in str(text)]
    assert not missing, f"{missing} not in: {text}"


@contextmanager
def command_line() -> Iterator[CommandLine]:
    """The command for as long as the block lasts."""
    with (
        tempfile.TemporaryDirectory() as home,
        subprocess.Popen(
            [sys.executable, "-c", _SERVER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "COLUMNS": "200"},
        ) as server,
    ):
        yield CommandLine(server=server, home=Path(home))
