"""What a job may ask: refused by the limit's name, with who can change it."""

import pytest

from dataservice.core.errors import QuotaError, SpecError
from dataservice.core.job import BatchSize
from dataservice.core.job_limits import DEFAULT_JOB_LIMITS, DrawnSize, EpochSize, JobLimits

TEXTS = EpochSize(samples=1e9, tokens=4e11)


def require(batch, *, replicas, window_steps=1, epoch=TEXTS):
    drawn = epoch.drawn(batch, window_steps)
    drawn.require_step(DEFAULT_JOB_LIMITS)
    drawn.require_replicas(DEFAULT_JOB_LIMITS, replicas)


def test_600_000_samples_a_step_are_for_10_000_ranks_and_not_for_one():
    require(BatchSize(samples=600_000), replicas=10_000)
    with pytest.raises(QuotaError, match=r"600,000.* most 16,384.*max_replica_samples"):
        require(BatchSize(samples=600_000), replicas=1)


@pytest.mark.parametrize(
    ("batch", "window_steps", "limit"),
    [
        (BatchSize(samples=1_000_000_000), 1, "max_step_samples"),
        (BatchSize(samples=250_000), 8, "max_step_samples"),
        (BatchSize(tokens=10**12), 1, "max_step_samples"),
        (BatchSize(tokens=10**18), 1, "max_step_samples"),
    ],
)
def test_a_step_has_a_limit_at_any_number_of_ranks(batch, window_steps, limit):
    with pytest.raises(QuotaError, match=limit):
        require(batch, replicas=65_536, window_steps=window_steps)


def test_a_batch_of_tokens_over_tiny_samples_is_counted_in_samples_too():
    tiny, empty = EpochSize(samples=1e6, tokens=1e6), EpochSize(samples=1e6, tokens=0)
    for epoch in (tiny, empty):
        with pytest.raises(QuotaError, match="max_step_samples"):
            require(BatchSize(tokens=4_000_000), replicas=4096, epoch=epoch)
    long = EpochSize(samples=1e6, tokens=1e12)
    with pytest.raises(QuotaError, match="max_step_tokens"):
        require(BatchSize(samples=100_000), replicas=4096, epoch=long)
    with pytest.raises(QuotaError, match="max_replica_tokens"):
        require(BatchSize(samples=64), replicas=1, epoch=long)


def test_a_batch_that_goes_round_a_few_samples_ten_thousand_times_is_refused():
    with pytest.raises(QuotaError, match="max_step_epochs"):
        require(BatchSize(samples=16_000), replicas=1, epoch=EpochSize(samples=1, tokens=9))


def test_weights_count_where_they_show_samples_more_than_once():
    limits = JobLimits(max_samples=1000)
    limits.check_epoch([500, 500], [1.0, 0.1])
    with pytest.raises(QuotaError, match=r"1,100.*max_samples"):
        limits.check_epoch([500, 500], [1.2, 0.1])


def test_a_refusal_says_who_can_raise_the_limit():
    drawn = DrawnSize(samples=20_000, tokens=1)
    with pytest.raises(QuotaError, match=r"ask the operator to raise job_limits.max_repl"):
        drawn.require_replicas(DEFAULT_JOB_LIMITS, 1)
    with pytest.raises(QuotaError, match="max_step_samples"):
        DrawnSize(samples=float("nan"), tokens=1).require_step(DEFAULT_JOB_LIMITS)


def test_a_limit_of_nothing_is_no_limit():
    with pytest.raises(SpecError, match=r"job_limits.max_waves is 0"):
        JobLimits(max_waves=0)
