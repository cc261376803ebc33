"""Samples of one order are begun together, and each answers for itself."""

import os
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import numpy as np
import pytest

from dataservice.core.errors import SampleError
from dataservice.core.ports import SampleDecoder
from dataservice.core.sample import DecodedSample, RawSample
from dataservice.workers.read_and_decode import read_and_decode
from dataservice.workers.sample_pipelines import Pipeline
from tests.workers.trouble import Reader, a_sample


class Steps(SampleDecoder):
    """Notes what is done, and fails in the step that a sample's key names."""

    pad_token_id = 0

    def __init__(self):
        self.steps: list[str] = []
        self.failed: set[str] = set()

    def begin(self, samples):
        keys = [sample.raw.key for sample in samples]
        self.steps.append(f"begin {' '.join(keys)}")
        if "begin" in keys:
            raise SampleError("it cannot begin")
        return super().begin(samples)

    def decode(self, raw: RawSample, planned, epoch=None, places=()):
        self.steps.append(raw.key)
        if raw.key == "full" and "full" not in self.failed:
            self.failed.add("full")
            raise MemoryError("beside the others")
        if raw.key == "decode":
            raise SampleError("it cannot be decoded")
        ids = np.zeros(planned.llm_tokens, np.int32)
        return DecodedSample(input_ids=ids, labels=ids)


@pytest.fixture
def steps():
    return Steps()


def outcomes(steps, *keys, **given):
    samples = [a_sample(number, key) for number, key in enumerate(keys)]
    return list(read_and_decode(Pipeline(reader=Reader(), decoder=steps), samples, **given))


def test_all_samples_are_begun_before_the_first_is_decoded(steps):
    made = outcomes(steps, "a", "gone", "b", begun=lambda: steps.steps.append("begun"))
    assert [outcome.reason for outcome in made] == ["", "the source has vanished", ""]
    assert steps.steps == ["begin a b", "begun", "a", "b"]


def test_a_sample_that_fails_in_any_step_spoils_no_other(steps):
    made = outcomes(steps, "a", "begin", "decode", "b")
    wanted = ["", "it cannot begin", "it cannot be decoded", ""]
    assert [outcome.reason for outcome in made] == wanted


def test_a_sample_that_found_no_memory_beside_others_is_tried_alone(steps):
    made = outcomes(steps, "a", "full", "b")
    assert [outcome.reason for outcome in made] == ["", "", ""]
    assert steps.steps == ["begin a full b", "a", "full", "begin full", "full", "b"]


class Read(Reader):
    """Reads by doing what it is given."""

    def __init__(self, does):
        self.does = does

    def read(self, ref):
        self.does()
        return super().read(ref)


def spin():
    """Until the processor has worked for 0.1 s."""
    end_s = time.thread_time() + 0.1
    while time.thread_time() < end_s:
        pass


def read_beside_a_rival():
    """The outcome of a read that spins, on a processor that another process wants too."""
    processor = {min(os.sched_getaffinity(0))}
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as rival:
        try:
            for process in (0, rival.pid):
                os.sched_setaffinity(process, processor)
            pipeline = Pipeline(reader=Read(spin), decoder=Steps())
            (robbed,) = read_and_decode(pipeline, [a_sample(0, "a")])
            return robbed
        finally:
            rival.kill()


def test_a_read_that_only_wants_a_processor_is_no_wait_for_storage(steps):
    """On a busy machine; else every source there would be read ahead, which takes more of it."""
    # In a process that has one thread, as a decoder has: a thread of the tests that wanted the
    # interpreter meanwhile would make the read wait for it.
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as alone:
        robbed = alone.submit(read_beside_a_rival).result()
    assert robbed.read_s == robbed.read_cpu_s < robbed.seconds
    pipeline = Pipeline(reader=Read(lambda: time.sleep(0.01)), decoder=steps)
    (waited,) = read_and_decode(pipeline, [a_sample(0, "a")])
    assert waited.read_s > waited.read_cpu_s


def test_the_time_of_a_common_step_is_shared(steps, monkeypatch):
    now, worked = iter(range(1000)), iter(range(1000))
    clock = type("Clock", (), {"perf_counter": lambda: next(now), "thread_time": lambda: 0.0})
    monkeypatch.setattr("dataservice.workers.read_and_decode.time", clock)
    first, second = outcomes(steps, "a", "b", cpu_clock=lambda: next(worked))
    assert first.read_s == second.read_s == 1
    assert first.seconds == second.seconds == 1 + 0.5 + 1
