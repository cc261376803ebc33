"""Files of every older release go on with all they hold."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from dataservice.core.job import (
    AttemptRecord,
    CostRecord,
    JobRecord,
    LedgerEntry,
    QuarantineEntry,
    SkipRecord,
    SpecRecord,
)
from dataservice.state.directory import BACKUP
from dataservice.state.schema import MIGRATIONS
from dataservice.state.sqlite import SqliteStateStore
from tests.ledger import ledger_of

VERSIONS = sorted(Path(__file__).parent.glob("versions/v*.sql"))


def written(script: Path, folder: Path) -> Path:
    """The file that the release of this script left behind."""
    with closing(sqlite3.connect(folder / "state.db")) as connection:
        connection.executescript(f"PRAGMA journal_mode = WAL; {script.read_text()}")
    return folder


def test_there_is_a_file_of_every_version_but_the_newest() -> None:
    assert [path.stem for path in VERSIONS] == [f"v{n}" for n in range(1, len(MIGRATIONS))]


@pytest.mark.parametrize("script", VERSIONS, ids=lambda path: path.stem)
def test_an_older_file_keeps_every_row_and_takes_new_ones(script: Path, tmp_path: Path) -> None:
    has_costs, has_skips = script.stem != "v1", script.stem not in ("v1", "v2")
    store = SqliteStateStore(written(script, tmp_path))
    (job,) = store.jobs()
    assert job == JobRecord(
        name="vlm-sft", spec_json='{"seed": 1}', index_fingerprint="f1", created_unix_s=10.25
    )
    assert store.specs("vlm-sft") == [
        SpecRecord(
            job="vlm-sft", version=1, spec_json=job.spec_json, submitted_unix_s=job.created_unix_s
        )
    ]
    assert store.last_attempt("vlm-sft") == AttemptRecord(
        job="vlm-sft", attempt=2, world_size=6, start_cursor='{"step": 3}', opened_unix_s=21.5
    )
    first, second = ledger_of(store, "vlm-sft")
    assert first == LedgerEntry(
        job="vlm-sft",
        attempt=1,
        step=0,
        cursor='{"step": 0}',
        plan_digest="digest-1-0",
        world_size=8,
        cost_version="v1",
        planned_unix_s=12.125,
        committed_unix_s=12.5,
        predicted_s=0.5 if has_costs else None,
        measured_s=0.625 if has_costs else None,
    )
    assert (second.step, second.committed_unix_s) == (1, None)
    cost = CostRecord(
        job="vlm-sft", from_step=1, cost_json="{}", cost_version="v2", recorded_unix_s=13.5
    )
    assert store.costs("vlm-sft") == ([cost] if has_costs else [])
    assert store.quarantine("vlm-sft") == [
        QuarantineEntry(
            job="vlm-sft", attempt=1, step=0, sample_id=7, source="images", key="000007",
            reason="corrupt",
        )
    ]  # fmt: skip
    assert store.quarantined_samples("vlm-sft") == 1
    known = SkipRecord(
        job="vlm-sft", number=1, first_step=7, last_step=8, action="skip", from_attempt=2,
        recorded_unix_s=20.5,
    )  # fmt: skip
    before = [known] if has_skips else []
    assert store.skips("vlm-sft") == before
    (skip,) = store.add_skips("vlm-sft", [(3, 5)], "skip", 30.5)
    assert (skip.from_attempt, store.skips("vlm-sft")) == (3, [*before, skip])
    store.commit_step("vlm-sft", 1, 1, 31.5, 0.5)
    store.put_cost(cost)
    store.close()
    # What the older release wrote is kept beside it, as it was.
    with closing(sqlite3.connect(tmp_path / BACKUP)) as backup:
        version = backup.execute("SELECT MAX(version) FROM migrations").fetchone()
    assert version == (int(script.stem[1:]),)
    SqliteStateStore(tmp_path).close()
