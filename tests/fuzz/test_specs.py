"""Job files and configs that are nearly right are read, or refused by the name of a key."""

import pytest

from dataservice.core.errors import SpecError
from dataservice.job_pipeline import decoder_of, reader_of
from tests.fuzz.campaign import FACTOR, SEED, campaign


def test_a_damaged_job_file_or_config_is_valid_or_refused_by_its_key() -> None:
    names = [f"{SEED} spec {number}".encode() for number in range(int(1500 * FACTOR))]
    campaign("spec", names, "tests.fuzz.tasks:spec", lambda _, name: name.decode(), None)


@pytest.mark.parametrize("text", ["", "{", "{}", "[]", '{"sources": 3}', "[" * 100_000])
def test_what_is_no_pipeline_is_refused_by_a_worker(text: str) -> None:
    """Found by mutated requests: a pack order without sources was a KeyError."""
    for build in (reader_of, lambda pipeline: decoder_of({}, pipeline)):
        with pytest.raises(SpecError, match="no job's pipeline"):
            build(text)
