"""Steps drawn from a bare index are those of a job that says nothing of a mixture."""

import itertools
import shutil

import numpy as np
import pytest
import yaml

from dataservice.core.cursor import Cursor
from dataservice.core.errors import IndexStaleError, SourceError, SpecError
from dataservice.engine.planner import draw_step
from dataservice.jobs.index_batches import index_batches
from dataservice.jobs.indexing import index_job
from dataservice.jobs.job_file import read_job
from dataservice.jobs.setup import job_records, open_job
from tests.service.small import SAMPLES, make_corpus, write_job


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    made = make_corpus(tmp_path_factory.mktemp("bare") / "corpus")
    index_job(read_job(write_job(made).read_text(), made), custom_processors={})
    return made


def index(home):
    return str(home / "index")


def test_they_have_the_samples_and_lengths_of_the_jobs_own_steps(home):
    plain = yaml.safe_load(write_job(home).read_text())
    by_name = sorted(plain["sources"], key=lambda source: source["name"])
    path = write_job(home, job="by-name", batch={"samples": 6}, sources=by_name)
    record = job_records(path.read_text(), str(home))[0]
    setup = open_job(record, custom_processors={})
    cursor, bare = Cursor(order=setup.order), index_batches(index(home), samples=6, steps=3)
    assert len(bare) == 3
    for mine in bare:
        theirs, cursor = draw_step(setup, cursor)
        assert len(mine.sample_ids) == 6
        assert mine.sample_ids.tolist() == theirs.sample_ids.tolist()
        assert mine.lengths.llm_tokens.tolist() == theirs.lengths.llm_tokens.tolist()


def test_no_sample_comes_twice_and_only_whole_steps_are_drawn(home):
    steps = index_batches(index(home), samples=5, steps=64)
    assert len(steps) == SAMPLES // 5
    ids = np.concatenate([step.sample_ids for step in steps])
    assert len(set(ids.tolist())) == len(ids)


def test_a_batch_larger_than_the_index_is_refused_with_how_many_there_are(home):
    with pytest.raises(SpecError, match=rf"--batch is 999, .* has {SAMPLES} samples: give at most"):
        index_batches(index(home), samples=999, steps=1)


def test_a_folder_without_an_index_is_refused_with_the_command_that_writes_one(home, tmp_path):
    with pytest.raises(SourceError, match="no such file"):
        index_batches(str(tmp_path / "away"), samples=1, steps=1)
    with pytest.raises(SourceError, match=r"no complete index of a source.*dataservice index"):
        index_batches(str(tmp_path), samples=1, steps=1)


def test_the_folder_of_one_source_is_refused_with_the_one_above_it(home):
    with pytest.raises(SourceError, match=r"the index of one source, 'images'.*corpus/index"):
        index_batches(f"{index(home)}/images", samples=1, steps=1)


def test_a_damaged_part_is_named(home, tmp_path):
    shutil.copytree(home / "index", tmp_path / "index")
    part = next(itertools.chain((tmp_path / "index" / "images").glob("part-*")))
    part.write_bytes(part.read_bytes()[:100])
    with pytest.raises(IndexStaleError, match="missing or damaged"):
        index_batches(str(tmp_path / "index"), samples=1, steps=1)
