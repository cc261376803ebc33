"""Whoever indexes, opens or looks at a job is told once what the image processor saved beside its
tokenizer does otherwise."""

import logging

import pytest
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from dataservice.jobs.dry_run import dry_run
from dataservice.jobs.find_samples import Wanted
from dataservice.jobs.indexing import index_job
from dataservice.jobs.preview import preview_job
from dataservice.jobs.setup import job_records, open_job
from tests.jobs.corpus import job_of, write_job

LINE = "vision: {kind: qwen2_vl, video_min_pixels: 3136, max_pixels: 50176}"


@pytest.fixture
def saved(home):
    """The corpus, whose model's own processor makes smaller pictures than its job."""
    size = {"shortest_edge": 3136, "longest_edge": 50176}
    Qwen2VLImageProcessorPil(size=size).save_pretrained(home / "tokenizer")
    return home


def warnings_of(caplog):
    return [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]


def opened(home, roots=None):
    text = (home / "job.yaml").read_text()
    (record,) = job_records(text, str(home), allowed_roots=roots)
    return open_job(record, custom_processors={}, allowed_roots=roots)


@pytest.mark.parametrize("processes", [1, 2])
def test_indexing_warns_once_with_the_line_to_write(saved, caplog, processes):
    index_job(job_of(saved), custom_processors={}, processes=processes)
    (told,) = warnings_of(caplog)
    assert "size.longest_edge: 50176" in told
    assert "12845056" in told
    assert LINE in told


def test_a_dry_run_warns_as_indexing_does(saved, caplog):
    dry_run(job_of(saved), samples_per_file=1, custom_processors={})
    (told,) = warnings_of(caplog)
    assert LINE in told


def test_a_service_that_opens_the_job_warns_under_its_name_once(saved, caplog):
    index_job(job_of(saved), custom_processors={})
    caplog.clear()
    setup = opened(saved, roots=[str(saved)])
    setup.require_current()
    (told,) = warnings_of(caplog)
    (note,) = setup.notes
    assert told == f"job job: {note}"
    assert LINE in note


def test_a_preview_notes_it(saved):
    told = []
    next(preview_job(job_of(saved), Wanted(), custom_processors={}, note=told.append))
    assert any(LINE in text for text in told)


def test_a_job_with_that_line_is_told_nothing(saved, caplog):
    vision = {"kind": "qwen2_vl", "max_pixels": 50176, "video_min_pixels": 3136}
    pipeline = {"tokenizer": "tokenizer", "vision": vision, "audio": {"kind": "whisper"}}
    write_job(saved, pipeline=pipeline)
    index_job(job_of(saved), custom_processors={})
    assert opened(saved).notes == ()
    assert warnings_of(caplog) == []


def test_a_folder_without_a_processor_is_told_nothing(home, caplog):
    index_job(job_of(home), custom_processors={})
    assert opened(home).notes == ()
    assert warnings_of(caplog) == []
