"""A catalog whose locations come late is completed while its job runs, if that is still there."""

import gc
import os
import threading
from collections.abc import Callable, Sequence
from typing import cast

import numpy as np
import pytest

from benchmarks.scale.made_job import hand_over, made_catalog
from dataservice.core.errors import IndexStaleError, ServiceError, SourceError, WorkerLostError
from dataservice.core.job import JobRecord
from dataservice.core.limits import DEFAULT_LIMITS
from dataservice.core.team import team_of
from dataservice.jobs.late_index import TEAMS_AT_ONCE, LateIndexes
from dataservice.sources.catalog import IndexedCatalog
from dataservice.sources.index_cache import NO_CACHE
from tests.waiting import LIMIT_S, wait_for

SAMPLES = 300
IDS = np.array([7, 250, 7])


class Opener:
    """Reads an index of made-up samples once the door is open, that of a `free` team at once, and
    fetches rows of it."""

    def __init__(self, error: Exception | None = None) -> None:
        self.door = threading.Event()
        self.made = made_catalog(SAMPLES)
        self._files = hand_over(self.made)
        self.read_times = self.fetched = 0
        self.free: set[str] = set()
        self.reading: list[str] = []  # jobs
        self.most_at_once = 0
        self._error = error
        self._late = LateIndexes(
            fetch=self._fetch, read=self._read, cache=NO_CACHE, limits=DEFAULT_LIMITS
        )

    def opened(self, name: str = "job") -> IndexedCatalog:
        record = JobRecord(name=name, spec_json="{}", index_fingerprint="made")
        return self._late.catalog(record, self.made.parts, os.dup(self._files.lengths))

    def _fetch(self, of: Sequence[object]) -> int:
        self.fetched += 1
        return os.dup(self._files.details)  # of all rows, whichever were asked for

    def _read(self, of: Sequence[object]) -> int:
        record = cast(dict[str, str], of[0])
        self.reading.append(record["name"])
        self.most_at_once = max(self.most_at_once, len(self.reading))
        if team_of(record["name"]) not in self.free:
            assert self.door.wait(LIMIT_S)
        self.reading.remove(record["name"])
        self.read_times += 1
        if self._error is not None:
            raise self._error
        return os.dup(self._files.details)


def descriptors() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def ended(name: str = "reading an index") -> Callable[[], bool]:
    return lambda: not any(each.name == name for each in threading.enumerate())


def test_it_is_complete_once_all_was_read():
    opener = Opener()
    late = opener.opened()
    assert not late.at_hand
    opener.door.set()
    wait_for(lambda: late.at_hand)
    assert late.details(IDS)[:] == opener.made.details(IDS)[:]
    assert opener.fetched == 0


def test_rows_that_are_not_those_that_were_asked_for_are_refused():
    opener = Opener()
    with pytest.raises(IndexStaleError, match="other lengths"):
        opener.opened().fetch(IDS)
    opener.door.set()
    wait_for(ended())


@pytest.mark.parametrize("error", [SourceError("away"), WorkerLostError("it died")])
def test_one_that_could_not_be_read_whole_still_fetches_for_each_step(error: ServiceError):
    opener = Opener(error=error)
    late = opener.opened()
    opener.door.set()
    wait_for(ended())
    assert not late.at_hand
    late.fetch(np.arange(SAMPLES))
    assert opener.fetched == 1


def test_one_that_was_found_to_be_damaged_gives_nothing_any_more():
    opener = Opener(error=IndexStaleError("it holds other samples"))
    late = opener.opened()
    opener.door.set()
    wait_for(ended())
    with pytest.raises(IndexStaleError, match="other samples"):
        late.fetch(np.arange(SAMPLES))


def test_of_a_job_that_is_gone_when_its_turn_comes_nothing_is_read():
    opener = Opener()
    first, second = opener.opened("first"), opener.opened("second")
    del second
    gc.collect()
    opener.door.set()
    wait_for(ended())
    assert first.at_hand
    assert opener.read_times == 1


def test_a_team_whose_storage_hangs_keeps_no_other_from_reading_its_own():
    opener = Opener()
    opener.free = {"blue"}
    hanging = [opener.opened(f"red/{k}") for k in range(3)]
    wait_for(lambda: opener.reading)
    done = [opener.opened(f"blue/{k}") for k in range(3)]
    wait_for(lambda: all(each.at_hand for each in done))
    assert len(opener.reading) == 1, "a team's indexes are read one after another"
    opener.door.set()
    wait_for(lambda: all(each.at_hand for each in hanging))
    wait_for(ended())


def test_indexes_of_no_more_than_a_few_teams_are_read_at_once():
    opener = Opener()
    opened = [opener.opened(f"team-{k}/job") for k in range(TEAMS_AT_ONCE + 2)]
    wait_for(lambda: len(opener.reading) == TEAMS_AT_ONCE)
    opener.door.set()
    wait_for(lambda: all(each.at_hand for each in opened))
    wait_for(ended())
    assert opener.most_at_once == TEAMS_AT_ONCE


def test_it_leaves_no_descriptor_behind():
    opener = Opener()
    opener.door.set()
    before = descriptors()
    for _ in range(3):
        late = opener.opened()
        wait_for(ended())
    assert late.at_hand
    del late
    assert descriptors() <= before
