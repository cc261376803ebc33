"""A job in memory of which steps are trained, and the samples of its steps."""

from dataservice.core.cursor import Cursor
from tests.engine.sessions import open_all, train
from tests.engine.support import make_coordinator, make_setup

STEPS = 13  # 200 samples in batches of 16


async def trained(store, books, steps=100, *, world=2, start=Cursor(), metrics=None):  # noqa: B008
    """A coordinator of which one attempt has trained this number of steps, and its sessions."""
    coordinator = make_coordinator(store, books, make_setup(), metrics=metrics)
    await coordinator.start()
    await coordinator.submit("job", "")
    sessions = await open_all(coordinator, world=world, cursor=start)
    await train(coordinator, sessions, start.step, steps)
    return coordinator, sessions


def sample_of(step, place=0, *, setup=make_setup()):  # noqa: B008
    """The id of a sample of a step, by its place in draw order."""
    draw, cursor = None, Cursor()
    for _ in range(step + 1):
        draw = setup.stream.draw(epoch=cursor.epoch, position=cursor.position, batch=setup.batch)
        cursor = Cursor(step=cursor.step + 1, epoch=draw.next_epoch, position=draw.next_position)
    return int(draw.sample_ids[place])
