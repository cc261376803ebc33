"""Frameworks' loops over the scripted service: what a run and the run resumed from its checkpoint
train must be what an uninterrupted run trains."""

STEPS = 6


def ids_of(shard):
    """The samples of a shard; the scripted service puts the step into their ids."""
    return [i for mb in shard.microbatches for i in mb.sample_ids.tolist()]


def everything():
    """What an uninterrupted run trains."""
    return [[10 * step, 7, 3] for step in range(STEPS)]
