"""Work whose caller was cancelled and which then fails; tasks that are cancelled together."""

import asyncio
import gc

from dataservice.core.errors import StateError
from dataservice.engine.tasks import cancel_all, detach


async def test_an_error_that_nobody_waits_for_any_more_is_not_logged_as_lost():
    lost = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: lost.append(context))
    go = asyncio.Event()

    async def fail():
        await go.wait()
        raise StateError("state.db: database or disk is full. Free space.")

    async def ask():
        await asyncio.shield(detach(fail()))

    asking = asyncio.create_task(ask())
    await asyncio.sleep(0)
    asking.cancel()
    await asyncio.wait({asking})
    go.set()
    await asyncio.sleep(0.01)
    gc.collect()
    assert not lost


async def test_whoever_waits_gets_the_error():
    async def fail():
        raise StateError("full")

    told = await asyncio.gather(
        *(asyncio.shield(work) for work in [detach(fail())] * 2), return_exceptions=True
    )
    assert [str(each) for each in told] == ["full", "full"]


async def test_cancelled_tasks_have_ended_whatever_they_do_about_it():
    async def fail_at_the_end():
        try:
            await asyncio.Event().wait()
        finally:
            raise StateError("full")

    tasks = [asyncio.create_task(asyncio.Event().wait()), asyncio.create_task(fail_at_the_end())]
    await asyncio.sleep(0)
    await cancel_all(*tasks, None)
    assert all(task.done() for task in tasks)
