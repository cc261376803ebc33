"""The gate that stands for a failing network closes whatever came to it."""

import gc
import socket
import threading
import time
import warnings

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
