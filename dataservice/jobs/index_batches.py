"""Steps drawn from a bare index, without its job: what a job that says nothing of a mixture trains.

Every source has weight 1 and the seed is 0, as in a job file that leaves both out. What only a job
knows is missing: held-out sources are drawn as well, and items are encoded whole.
"""

from dataservice.core.errors import SpecError
from dataservice.core.job import BatchSize
from dataservice.core.limits import DEFAULT_LIMITS, DecodeLimits
from dataservice.planning.compose import StepSamples
from dataservice.sources.index_lengths import read_index_lengths
from dataservice.sources.mixture import Mixture


def index_batches(
    index_dir: str,
    *,
    samples: int,
    steps: int,
    seed: int = 0,
    limits: DecodeLimits = DEFAULT_LIMITS,
) -> tuple[StepSamples, ...]:
    """The first `steps` steps of `samples` each, in the order of the mixture; fewer where the index
    has fewer whole ones. Raises SpecError where it has not even one; SourceError, IndexStaleError
    where it cannot be read."""
    index = read_index_lengths(index_dir, limits=limits)
    if samples > index.samples:
        raise SpecError(
            f"--batch is {samples:,}, and the index {index_dir} has {index.samples:,} samples: "
            f"give at most {index.samples:,}, or index more"
        )
    mixture = Mixture(index.sizes, [1.0] * len(index.sizes), seed=seed, epochs=1)
    batch, position, found = BatchSize(samples=samples), 0, []
    for _ in range(min(steps, index.samples // samples)):
        draw = mixture.draw(epoch=0, position=position, batch=batch)
        lengths = index.lengths(draw.sample_ids)
        found.append(StepSamples(sample_ids=draw.sample_ids, epoch=draw.epoch, lengths=lengths))
        position += len(draw.sample_ids)
    return tuple(found)
