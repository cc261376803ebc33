"""Job files and configs that are nearly right are read, or refused by the name of a key."""

import pytest

from dataservice.core.errors import SpecError
from dataservice.engine.jobs import cost_model
from dataservice.jobs.sample_pipeline import decoder_of, reader_of
from tests.fuzz.campaign import FACTOR, SEED, Tally, campaign


def test_a_damaged_job_file_or_config_is_valid_or_refused_by_its_key(tally: Tally) -> None:
    names = [f"{SEED} spec {number}".encode() for number in range(int(1500 * FACTOR))]
    campaign(
        tally,
        "job file, config",
        names,
        "tests.fuzz.tasks:spec",
        lambda _, name: name.decode(),
        None,
    )


@pytest.mark.parametrize("text", ["", "{", "{}", "[]", '{"sources": 3}', "[" * 100_000])
def test_what_is_no_pipeline_is_refused_by_a_worker(text: str) -> None:
    """Found by mutated requests: a pack order without sources was a KeyError."""
    for build in (reader_of, lambda pipeline: decoder_of({}, pipeline)):
        with pytest.raises(SpecError, match="no job's pipeline"):
            build(text)


@pytest.mark.parametrize(
    "text", ["", "[" * 5000, "1" * 5000, "[]", '{"vision": {"linear_s_per_token": 1%s}}']
)
def test_what_is_no_cost_model_is_refused(text: str) -> None:
    """Found by mutated requests: what nests too deep, or is too large for a float, was not."""
    with pytest.raises(SpecError, match="no JSON object of coefficients"):
        cost_model(text.replace("%s", "0" * 400))
