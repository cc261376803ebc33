import asyncio
import threading

import pytest

from dataservice.core.threads import CallThreads
from tests.waiting import until


@pytest.fixture
def gate():
    """Calls wait here until the test is done."""
    gate = threading.Event()
    yield gate
    gate.set()


async def test_calls_that_hang_leave_other_purposes_their_threads(gate):
    hanging, other = CallThreads("planning", 2), CallThreads("state store", 1)
    calls = [asyncio.create_task(hanging(gate.wait)) for _ in range(5)]
    assert await asyncio.wait_for(other(lambda: "answered"), 30) == "answered"
    assert not any(call.done() for call in calls)
    gate.set()
    assert await asyncio.gather(*calls) == [True] * 5


async def test_a_purpose_is_stuck_only_when_no_thread_is_left(gate):
    threads = CallThreads("planning", 2)
    first = asyncio.create_task(threads(gate.wait))
    await until(threads.running)
    await asyncio.sleep(0.3)
    assert threads.stuck_s(0.1) is None
    second = asyncio.create_task(threads(gate.wait))
    await until(lambda: threads.stuck_s(0.1) is not None)
    assert threads.stuck_s(0.1) > 0.1
    assert threads.stuck_s(600) is None
    assert [call.name for call in threads.running()] == ["Event.wait"] * 2
    gate.set()
    await asyncio.gather(first, second)
    assert threads.running() == []


async def test_a_call_raises_what_its_function_raises():
    def fail():
        raise KeyError("a")

    threads = CallThreads("planning", 1)
    with pytest.raises(KeyError):
        await threads(fail)
    assert threads.running() == []


async def test_a_call_that_is_cancelled_before_it_has_a_thread_never_begins(gate):
    threads, begun = CallThreads("planning", 1), []
    first = asyncio.create_task(threads(gate.wait))
    waiting = asyncio.create_task(threads(begun.append, 1))
    await until(threads.running)
    waiting.cancel()
    await asyncio.wait({waiting})
    gate.set()
    await first
    await threads(lambda: None)
    assert begun == []
