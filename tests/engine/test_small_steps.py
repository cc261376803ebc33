"""What a step of few samples costs the coordinator, in calls: no clock is asked."""

import sys
from collections.abc import Callable

from dataservice.core.cursor import Cursor
from dataservice.core.ports import NoMetrics
from dataservice.core.team import TeamShare
from dataservice.engine.attempt import Attempt
from dataservice.engine.records import AttemptRecords, MadeStep
from dataservice.state.memory import MemoryStateStore
from tests.engine.support import make_setup

MOST_CALLS = 1_900  # 1,500 when this was written, and 2,360 before


def calls_of(work: Callable[[], object]) -> int:
    """The calls of Python functions that some work makes."""
    made = 0

    def count(_frame: object, event: str, _argument: object) -> None:
        nonlocal made
        made += event == "call"

    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    return made


async def test_a_small_step_is_planned_in_few_calls() -> None:
    setup = make_setup(samples=320, batch=32, memory_tokens=100_000)
    attempt = Attempt(job="job", number=1, topology=setup.topology(2), start=Cursor())
    records = AttemptRecords(attempt, store=MemoryStateStore(), metrics=NoMetrics())
    steps: list[MadeStep] = []

    def plan() -> None:
        cursor = steps[-1].planned.next_cursor if steps else Cursor()
        made = records.plan(setup, cursor, TeamShare())
        assert made is not None
        steps.append(made)

    plan()  # kernels are compiled, and what a job has once is made
    assert calls_of(plan) <= MOST_CALLS
    assert steps[-1].orders.written_soon
