"""The whole ledger of a job, which the service itself never asks for at once."""

from dataservice.core.job import LedgerEntry
from dataservice.core.state_store import StateStore


def ledger_of(store: StateStore, job: str) -> list[LedgerEntry]:
    """All entries of a job by (attempt, step)."""
    steps = range(store.last_planned_step(job) + 1)
    entries = [entry for step in steps for entry in store.ledger_of_step(job, step)]
    return sorted(entries, key=lambda entry: (entry.attempt, entry.step))
