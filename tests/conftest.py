import gc
import os
import signal

import pytest
from hypothesis import HealthCheck, settings

import soak.service
from tests import forked_commands

# A shell starts what it puts in the background with SIGINT ignored, and processes hand that on:
# programs that tests start would not hear the ^C that tests send them.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Tests run side by side, and so do ranks within one: threads of all of them that wait for one
# another by spinning made a step of 2 s take 40. Before torch is loaded, and for what tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")

soak.service.start = forked_commands.start  # a service then starts in a fifth of the time

# No test asserts a time: on a busy machine an example may take long, and so may drawing one.
settings.register_profile("no clock", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("no clock")


@pytest.fixture(autouse=True, scope="module")
def _collect_only_what_is_new():
    """Thousands of tests and the libraries of all rooms are millions of objects: looking through
    them took a second at each collection, and half the time of some files."""
    gc.collect()
    gc.freeze()
