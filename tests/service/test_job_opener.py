"""A job is opened in a process of its own, whatever its team wrote into its files."""

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dataservice.core.errors import IndexStaleError, SpecError
from dataservice.core.job_limits import JobLimits
from dataservice.core.job_setup import JobSetup
from dataservice.core.limits import DEFAULT_LIMITS, OpeningLimits
from dataservice.jobs.indexing import index_job
from dataservice.jobs.job_file import read_job
from dataservice.jobs.opener import JobOpener
from dataservice.jobs.sample_pipeline import decoder_of
from dataservice.jobs.setup import job_records, open_job
from dataservice.sources.index_cache import IndexCache
from tests.service.deadly_vision import IMPORT_PATH, NAME
from tests.service.small import LARGE, LOOPS, SAMPLES, indexed_job, make_corpus, write_job
from tests.waiting import wait_for

QUICK = OpeningLimits(pipeline_cpu_s=1)
ENDLESS = OpeningLimits(pipeline_cpu_s=3600)
# What opens jobs has the lowest priority: beside other tests its seconds of CPU may take minutes.


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small corpus and its index; job.yaml lies in it."""
    made = make_corpus(tmp_path_factory.mktemp("opened"))
    indexed_job(made)
    return made


@pytest.fixture(scope="module")
def opener() -> Iterator[JobOpener]:
    made = JobOpener(
        custom_processors={NAME: IMPORT_PATH},
        limits=DEFAULT_LIMITS,
        allowed_roots=None,
        opening=QUICK,
    )
    made.start()
    yield made
    made.close()


def opened(opener: JobOpener, path: Path) -> JobSetup:
    return opener.open_job(opener.read_job(path.read_text(), str(path.parent), "")[0])


def with_template(home: Path, template: str) -> Path:
    """The same job under a chat template of its own."""
    (home / "hostile.jinja").write_text(template)
    pipeline = {"tokenizer": "tokenizer", "chat_template": "hostile.jinja"}
    return write_job(home, job="hostile", pipeline=pipeline)


def children() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))


def test_what_comes_back_is_what_opening_it_here_gives(opener, home):
    path = home / "job.yaml"
    there, here = (
        opened(opener, path),
        open_job(job_records(path.read_text(), str(home))[0], custom_processors={}),
    )
    ids = np.arange(here.catalog.samples)
    assert there.record.spec_json == here.record.spec_json
    assert there.record.index_fingerprint == here.record.index_fingerprint
    assert (there.order, there.pipeline, there.options) == (here.order, here.pipeline, here.options)
    assert there.catalog.sizes == here.catalog.sizes
    assert there.catalog.details(ids) == here.catalog.details(ids)
    for name in ("llm_tokens", "item_offsets", "item_position"):
        columns = (getattr(setup.catalog.lengths(ids), name) for setup in (there, here))
        np.testing.assert_array_equal(*columns)


def test_what_its_owner_should_know_comes_back_and_is_bounded(opener, home):
    """A path of escape sequences, in a folder that nobody else's job names."""
    folder = home / "\x1b[31mtokenizer"
    shutil.copytree(home / "tokenizer", folder)
    saved = {"image_processor_type": "Qwen2VLImageProcessor", "max_pixels": 50176}
    (folder / "preprocessor_config.json").write_text(json.dumps(saved))
    pipeline = {"tokenizer": folder.name, "vision": {"kind": "qwen2_vl", "video_min_pixels": 3136}}
    path = indexed_job(home, job="noted", pipeline={**pipeline, "positions": "sequence"})
    (note,) = opened(opener, path).notes
    assert "max_pixels: 50176" in note
    assert note.isprintable()


def test_no_process_that_opens_a_job_loads_libraries_for_itself(home):
    """It took each a third of a second, and some 100 MB."""
    script = """
import pickle, sys
from pathlib import Path
from dataservice.core.limits import DEFAULT_LIMITS, OpeningLimits
from dataservice.jobs.opener import OpenerProgram
from dataservice.jobs.setup import build_files, find_files, job_records
program = OpenerProgram(
    custom_processors={}, limits=DEFAULT_LIMITS, allowed_roots=None, opening=OpeningLimits()
)
assert pickle.loads(pickle.dumps(program)) == program  # as the nursery that forks them takes it up
loaded = {*sys.modules}
path = Path(sys.argv[1])
(record,) = job_records(path.read_text(), str(path.parent))
found = find_files(record, build_files(record, custom_processors={}))
found.rows.read(None)
print({name.split(".")[0] for name in sys.modules.keys() - loaded} & {"pandas", "numba", "scipy"})
"""
    command = [sys.executable, "-c", script, str(home / "job.yaml")]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "set()\n"


def test_its_process_has_ended_and_nothing_of_it_is_left(opener, home):
    before, descriptors = children(), len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        opened(opener, home / "job.yaml")
    assert children() <= before
    wait_for(lambda: len(os.listdir("/proc/self/fd")) <= descriptors + 1)


def test_a_template_that_loops_is_refused_by_the_limit_it_met(opener, home):
    with pytest.raises(SpecError, match=r"chat template.*more than 1 s of CPU"):
        opened(opener, with_template(home, LOOPS))


def test_a_job_file_that_takes_long_to_read_is_not_told_as_a_slow_template():
    opener = JobOpener(
        custom_processors={},
        limits=DEFAULT_LIMITS,
        allowed_roots=None,
        opening=QUICK,
        job_limits=JobLimits(max_job_file_bytes=2**23),
    )
    with closing(opener):
        opener.start()
        with pytest.raises(SpecError, match="the job file took more than 1 s of CPU to read"):
            opener.read_job(f"[{'[],' * 2**21}]", "/", "")


def test_a_template_that_wants_gigabytes_costs_this_process_nothing(opener, home):
    resident = psutil.Process().memory_info().rss
    with pytest.raises(SpecError) as refused:
        opened(opener, with_template(home, LARGE))
    assert len(str(refused.value)) < 5000
    assert psutil.Process().memory_info().rss < resident + 200e6


def test_a_message_that_a_template_writes_is_bounded(opener, home):
    path = with_template(home, "{% " + "unknown" * 500_000 + " %}")
    with pytest.raises(SpecError) as refused:
        opened(opener, path)
    assert len(str(refused.value)) < 5000


def test_a_process_that_dies_refuses_its_job_alone(opener, home):
    pipeline = {"tokenizer": "tokenizer", "vision": {"kind": "custom", "name": NAME}}
    with pytest.raises(SpecError, match="died of SIGABRT"):
        opened(opener, write_job(home, job="dies", pipeline=pipeline))
    assert opened(opener, home / "job.yaml").catalog.samples


def test_an_index_that_was_opened_before_is_not_read_again(home, tmp_path):
    """Also by the next service; unless what was kept of it is damaged."""
    shutil.copytree(home, tmp_path / "own")
    path, folder = tmp_path / "own" / "job.yaml", tmp_path / "cache"
    parts = sorted((tmp_path / "own").glob("index/*/part-*.parquet"))
    assert parts
    sizes = []
    for read_again in (True, False, True):
        cache = IndexCache(folder, 2**30)
        with closing(with_cache(cache)) as made:
            if not read_again:
                whole = [part.read_bytes() for part in parts]
                for part in parts:
                    overwritten(part, bytes(part.stat().st_size))
            sizes.append(opened(made, path).catalog.sizes)
            wait_for(partial(cache.names, ""))
            if not read_again:
                for part, data in zip(parts, whole, strict=True):
                    overwritten(part, data)
                for kept in folder.glob("*/*"):
                    kept.chmod(0o600)
                    os.truncate(kept, 100)
    assert sizes[0] == sizes[1] == sizes[2]


def test_an_index_whose_locations_come_late_is_the_same_index(home, tmp_path):
    """Before and after they were read; the next service finds both halves kept."""
    path, ids = home / "job.yaml", np.arange(SAMPLES)
    here = open_job(job_records(path.read_text(), str(home))[0], custom_processors={})
    cache = IndexCache(tmp_path, 2**30)
    with closing(late_opener(cache)) as made:
        there = opened(made, path)
        assert there.order == here.order
        assert there.catalog.details(ids) == here.catalog.details(ids)
        wait_for(lambda: there.catalog.at_hand, 120)
        assert there.catalog.details(ids) == here.catalog.details(ids)
        wait_for(partial(cache.names, ""))
        assert opened(made, path).catalog.at_hand
        there.require_current()


def test_locations_found_to_be_damaged_end_their_job_alone(home, tmp_path):
    moved = shutil.copytree(home, tmp_path / "moved")
    index_job(read_job((moved / "job.yaml").read_text(), moved), custom_processors={})
    part = next((moved / "index" / "texts").glob("part-*.parquet"))
    table = pq.read_table(part)
    keys = pa.array([f"other-{k}" for k in range(len(table))])
    place = table.schema.get_field_index("key")
    pq.write_table(table.set_column(place, table.schema.field(place), keys), part)
    with closing(late_opener(IndexCache(tmp_path / "cache", 2**30))) as made:
        bad = opened(made, moved / "job.yaml")
        good = opened(made, home / "job.yaml")
        wait_for(lambda: good.catalog.at_hand, 120)
        with pytest.raises(IndexStaleError, match="other samples than its manifest says"):
            bad.catalog.fetch(np.array([0]))
        good.catalog.details(np.arange(SAMPLES))


def late_opener(cache: IndexCache) -> JobOpener:
    """Reads every index's lengths first."""
    made = JobOpener(
        custom_processors={},
        limits=DEFAULT_LIMITS,
        allowed_roots=None,
        opening=replace(ENDLESS, late_index_samples=0),
        cache=cache,
    )
    made.start()
    return made


def with_cache(cache: IndexCache) -> JobOpener:
    made = JobOpener(
        custom_processors={},
        limits=DEFAULT_LIMITS,
        allowed_roots=None,
        opening=ENDLESS,
        cache=cache,
    )
    made.start()
    return made


def overwritten(path: Path, data: bytes) -> None:
    """Other bytes in a file that looks as it did."""
    before = path.stat()
    path.write_bytes(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.long
def test_storage_that_never_answers_is_given_up(opener, home, tmp_path):
    moved = shutil.copytree(home, tmp_path / "moved")
    impatient = JobOpener(
        custom_processors={},
        limits=DEFAULT_LIMITS,
        allowed_roots=None,
        opening=OpeningLimits(timeout_s=5),
    )
    impatient.start()
    record = opener.read_job((moved / "job.yaml").read_text(), str(moved), "")[0]
    (moved / "tokenizer" / "tokenizer.json").unlink()
    os.mkfifo(moved / "tokenizer" / "tokenizer.json")
    try:
        with pytest.raises(SpecError, match=r"within 5 s.*job_opening.timeout_s"):
            impatient.open_job(record)
    finally:
        impatient.close()


def test_closing_ends_what_is_being_opened(home):
    closing = JobOpener(
        custom_processors={}, limits=DEFAULT_LIMITS, allowed_roots=None, opening=ENDLESS
    )
    closing.start()
    path = with_template(home, LOOPS)
    errors: list[Exception] = []

    def try_it() -> None:
        try:
            opened(closing, path)
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=try_it)
    before = children()
    thread.start()
    wait_for(lambda: not children() <= before, 120)
    closing.close()
    thread.join(60)  # it would load its template for an hour
    assert not thread.is_alive()
    assert errors


def test_whether_the_index_is_current_is_looked_at_outside_too(opener, home, tmp_path):
    moved = shutil.copytree(home, tmp_path / "moved")
    index_job(read_job((moved / "job.yaml").read_text(), moved), custom_processors={})
    setup = opened(opener, moved / "job.yaml")
    setup.require_current()
    with (moved / "texts" / "texts.jsonl").open("a") as stream:
        stream.write(json.dumps({"id": "late", "text": "one more"}) + "\n")
    with pytest.raises(IndexStaleError):
        setup.require_current()


def swap_two_ids(tokenizer: Path) -> None:
    """Other ids of the same lengths: two words of the vocabulary change places."""
    plain: dict[str, Any] = json.loads(tokenizer.read_text())
    vocabulary = plain["model"]["vocab"]
    first, second = sorted(vocabulary, key=vocabulary.get)[-2:]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    tokenizer.write_text(json.dumps(plain))


def test_a_worker_refuses_another_tokenizer_by_file_and_both_digests(opener, home, tmp_path):
    moved = shutil.copytree(home, tmp_path / "moved")
    index_job(read_job((moved / "job.yaml").read_text(), moved), custom_processors={})
    setup = opened(opener, moved / "job.yaml")
    decoder_of({}, setup.pipeline)
    wanted = json.loads(setup.pipeline)["identity"]["tokenizer"]
    swap_two_ids(moved / "tokenizer" / "tokenizer.json")
    with pytest.raises(IndexStaleError) as refused:
        decoder_of({}, setup.pipeline)
    told = str(refused.value)
    assert str(moved / "tokenizer" / "tokenizer.json") in told
    assert wanted[:12] in told
    assert "another name" in told
