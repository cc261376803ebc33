"""A job in memory of which steps are trained, and the samples of its steps."""

from dataservice.core.cursor import Cursor
from tests.engine.sessions import open_all, settled, train
from tests.engine.support import make_coordinator, make_setup
from tests.ledger import ledger_of

STEPS = 13  # 200 samples in batches of 16


async def trained(store, books, steps=100, *, world=2, start=Cursor(), metrics=None):  # noqa: B008
    """A coordinator of which one attempt has trained this number of steps, and its sessions, once
    the ledger knows what they delivered. Raises what ended the attempt: that may be found out after
    the step was trained."""
    coordinator = make_coordinator(store, books, make_setup(), metrics=metrics)
    await coordinator.start()
    await coordinator.submit("job", "")
    sessions = await open_all(coordinator, world=world, cursor=start)
    await train(coordinator, sessions, start.step, steps)
    attempt = store.last_attempt("job").attempt

    async def known():
        if (await coordinator.job("job")).failure:
            await coordinator.session_ended(sessions[0].session)
        entries = [entry for entry in ledger_of(store, "job") if entry.attempt == attempt]
        return all(entry.content is not None for entry in entries if entry.committed_unix_s)

    await settled(known)
    return coordinator, sessions


def sample_of(step, place=0, *, setup=make_setup()):  # noqa: B008
    """The id of a sample of a step, by its place in draw order."""
    draw, cursor = None, Cursor()
    for _ in range(step + 1):
        draw = setup.stream.draw(epoch=cursor.epoch, position=cursor.position, batch=setup.batch)
        cursor = Cursor(step=cursor.step + 1, epoch=draw.next_epoch, position=draw.next_position)
    return int(draw.sample_ids[place])
