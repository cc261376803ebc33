"""A store that archives whatever it may, after every change."""

from collections.abc import Sequence
from pathlib import Path

from dataservice.core.job import LedgerEntry
from dataservice.state.sqlite import SqliteStateStore


class ArchivingStore(SqliteStateStore):
    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.moved = 0

    def put_ledger(self, entry: LedgerEntry, contents: Sequence[tuple[int, bytes]] = ()) -> None:
        super().put_ledger(entry, contents)
        self._archive_all()

    def commit_step(
        self,
        job: str,
        attempt: int,
        step: int,
        committed_unix_s: float,
        measured_s: float | None = None,
    ) -> None:
        super().commit_step(job, attempt, step, committed_unix_s, measured_s)
        self._archive_all()

    def put_content(self, job: str, attempt: int, step: int, content: bytes) -> None:
        super().put_content(job, attempt, step, content)
        self._archive_all()

    def _archive_all(self) -> None:
        while some := self.archive_ledger(float("inf")):
            self.moved += some
