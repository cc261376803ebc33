"""The gate that stands for a failing network closes whatever came to it."""

import contextlib
import gc
import socket
import socketserver
import threading
import time
import warnings

import pytest

from soak.gate import Gate, through_gate


def test_connections_that_come_as_the_gate_closes_are_closed_with_it():
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with Gate() as gate:
            host, _, port = through_gate(gate.control, "127.0.0.1:1").rpartition(":")
            # The gate stands still, so that it learns of them together with the order to close.
            standing = threading.Event()

            def stand_still(address):
                standing.set()
                time.sleep(0.5)

            threading.Thread(target=gate.cut, args=[stand_still]).start()
            standing.wait()
            late = [socket.create_connection((host, int(port))) for _ in range(3)]
        for line in late:
            line.close()
        gc.collect()
    assert [str(w.message) for w in told if "transport" in str(w.message)] == []


class Greeting(socketserver.BaseRequestHandler):
    def handle(self):
        self.request.sendall(b"hello")
        with contextlib.suppress(OSError):
            self.request.recv(1)  # until the other end is gone


@contextlib.contextmanager
def greeted(gate, address):
    """A connection through the gate to an address that is first asked for now."""
    host, _, port = through_gate(gate.control, address).rpartition(":")
    with socket.create_connection((host, int(port))) as line:
        yield line


@pytest.fixture
def greeter():
    """The address of a server that greets every connection."""
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Greeting) as server:
        threading.Thread(target=server.serve_forever).start()
        yield f"127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def test_an_address_first_asked_for_during_a_cut_is_cut_off_too(greeter):
    with Gate() as gate:
        gate.cut(lambda address: address == greeter)
        with greeted(gate, greeter) as line, pytest.raises(ConnectionResetError):
            line.recv(5)
        gate.heal()
        with greeted(gate, greeter) as line:
            assert line.recv(5) == b"hello"


def test_an_address_first_asked_for_during_silence_hears_nothing_before_its_end(greeter):
    with Gate() as gate:
        gate.silence(lambda address: address == greeter)
        with greeted(gate, greeter) as line:
            line.settimeout(0.3)
            with pytest.raises(TimeoutError):
                line.recv(5)
            gate.heal()
            line.settimeout(30)
            assert line.recv(5) == b"hello"


def test_an_address_first_asked_for_after_the_end_of_a_fault_is_not_affected(greeter):
    with Gate() as gate:
        gate.silence(lambda _: True)
        gate.heal()
        with greeted(gate, greeter) as line:
            assert line.recv(5) == b"hello"
