"""The loss weights of a job's sources: taken from its file, and changed with it."""

import pytest

from dataservice.core.job_setup import JobSetup
from dataservice.jobs.setup import job_records, open_job
from tests.jobs.corpus import indexed, write_job

TALKS = {"name": "talks", "format": "jsonl", "url": "talks.jsonl"}
PAGES = {"name": "pages", "format": "parquet", "url": "pages.parquet"}


@pytest.fixture
def opened(home):
    """The job over these sources, and the same under another version of its file."""

    def make(*sources, revised=None) -> JobSetup:
        path = write_job(home, sources=list(sources))
        indexed(home)
        setup = open_job(job_records(path.read_text(), str(home))[0], custom_processors={})
        if revised is None:
            return setup
        path = write_job(home, sources=list(revised))
        return setup.revise(setup, job_records(path.read_text(), str(home))[0])

    return make


def test_a_job_that_names_no_weight_has_none(opened):
    assert opened(TALKS, PAGES).loss_weights == ()
    assert opened({**TALKS, "loss_weight": 1}, PAGES).loss_weights == ()


def test_every_source_has_a_weight_where_one_has(opened):
    assert opened(TALKS, {**PAGES, "loss_weight": 0.5}).loss_weights == (1.0, 0.5)
    assert opened({**TALKS, "columns": {"loss_weight": "score"}}, PAGES).loss_weights == (1.0, 1.0)


def test_another_version_of_the_job_file_may_weigh_otherwise(opened):
    quiet = [TALKS, {**PAGES, "loss_weight": 0}]
    assert opened(TALKS, PAGES, revised=quiet).loss_weights == (1.0, 0.0)
    assert opened(*quiet, revised=[TALKS, PAGES]).loss_weights == ()
