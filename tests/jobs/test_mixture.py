"""The mixture of a job by its index: the same from each form of the index."""

from pathlib import Path

import pytest

from dataservice.core.errors import IndexStaleError
from dataservice.jobs.indexing import index_job
from dataservice.jobs.mixture import mixture_as_indexed, mixture_of_summaries, mixture_tree
from dataservice.jobs.sample_pipeline import pipeline_json, pipeline_of
from dataservice.sources.catalog import find_index
from tests.jobs.corpus import job_of, make_corpus


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("mixture") / "corpus")


def test_a_mixture_is_the_same_as_indexed_as_it_lies_on_disk_and_opened(home: Path) -> None:
    spec = job_of(home)
    with pytest.raises(IndexStaleError, match="source 'talks' has no complete index"):
        mixture_as_indexed(spec)
    summaries = index_job(spec, custom_processors={})
    indexed = mixture_of_summaries(spec, summaries)
    pipeline = pipeline_of(pipeline_json(spec.pipeline), {})
    opened = find_index(spec.sources, spec.index, pipeline.fingerprint).read()
    assert mixture_as_indexed(spec) == mixture_tree(spec, opened.totals) == indexed
    talks, pages = indexed.sources
    assert (talks.source, talks.samples, talks.tokens) == (
        "talks",
        summaries[0].rows,
        summaries[0].tokens.total,
    )
    assert indexed.epoch.samples == talks.samples + pages.samples
    assert talks.fingerprint != pages.fingerprint


def test_a_part_that_is_gone_is_told_with_the_remedy(home: Path, tmp_path: Path) -> None:
    spec = job_of(home).model_copy(update={"index": str(tmp_path)})
    index_job(spec, custom_processors={})
    for part in (tmp_path / "pages").glob("part-*"):
        part.unlink()
    with pytest.raises(IndexStaleError, match=r"missing or damaged.*dataservice index JOB\.yaml"):
        mixture_as_indexed(spec)
