"""The program of a server that forks `dataservice ARGUMENTS` where all is loaded that it runs.

    python -m tests.command_server SOCKET

A request names a command's arguments, environment and folder, and brings three descriptors: its
output, its errors, and where its exit status is written. The answer is its process id.

Loading the service's libraries and kernels takes five seconds of a processor on a slow machine, and
the suite starts hundreds of services and commands: more than all else that they do. A command that
is forked here is a process as any other: it has its own environment, output and exit status, and
signals end it. What finds a module, reads the environment as it is loaded, or looks at a command
line is tested by commands that are started anew.
"""

import contextlib
import faulthandler
import gc
import json
import os
import select
import signal
import socket
import sys
from typing import Any

import dataservice.app
import dataservice.serving.coordinator_client  # noqa: F401
from dataservice.cli import main as cli
from dataservice.planning.warm import warm_up

REQUEST_LIMIT_BYTES = 128 * 1024


def main() -> None:
    """Serve until the other end of the socket is closed; in a child, run the command."""
    control = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ^C is for the tests
    warm_up()
    gc.collect()
    gc.freeze()
    arguments = _Server(control).serve()
    if arguments is not None:
        sys.argv = [str(cli.__file__), *arguments]
        cli.main()


class _Server:
    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._running: dict[int, int] = {}
        self._ended, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def serve(self) -> list[str] | None:
        """The arguments of a command, in its process; None when nobody asks for one any more."""
        while True:
            ready, _, _ = select.select([self._control, self._ended], [], [])
            if self._ended in ready:
                os.read(self._ended, 4096)
                self._tell_of_ended()
            if self._control in ready:
                message, descriptors, _, _ = socket.recv_fds(self._control, REQUEST_LIMIT_BYTES, 4)
                if not message:
                    return None
                request = json.loads(message)
                if (process := os.fork()) == 0:
                    self._become(request, descriptors)
                    return list(request["arguments"])
                *outputs, status = descriptors
                for output in outputs:
                    os.close(output)
                self._running[process] = status
                self._control.send(json.dumps(process).encode())

    def _tell_of_ended(self) -> None:
        for process, status in list(self._running.items()):
            ended, code = os.waitpid(process, os.WNOHANG)
            if ended:
                with contextlib.suppress(BrokenPipeError):  # nobody waits for it
                    os.write(status, json.dumps(os.waitstatus_to_exitcode(code)).encode())
                os.close(status)
                del self._running[process]

    def _become(self, request: dict[str, Any], descriptors: list[int]) -> None:
        """Take the place of a process that was started with these."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        self._control.close()
        for status in self._running.values():
            os.close(status)
        output, error, status = descriptors
        os.dup2(output, 1)
        os.dup2(error, 2)
        for number in {output, error, status}:
            os.close(number)
        environment = request["environment"]
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(request["folder"])
        sys.path[0] = request["folder"]
        found = environment.get("PYTHONPATH", "").split(os.pathsep)
        sys.path[1:1] = [path for path in found if path not in sys.path]
        if environment.get("PYTHONFAULTHANDLER"):
            faulthandler.enable()


if __name__ == "__main__":
    main()
