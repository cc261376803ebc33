"""The messages with which both stores refuse a record."""

from dataservice.core.job import AttemptRecord


def no_such_job(name: str) -> str:
    """The record belongs to a job that was deleted or never submitted."""
    return f"there is no job {name!r}. Submit it first: `dataservice job submit JOB.yaml`."


def not_the_next_attempt(attempt: AttemptRecord, last: int) -> str:
    """Attempts count up from 1 without gaps."""
    return (
        f"attempt {attempt.attempt} of job {attempt.job!r} is not the next one, which is "
        f"{last + 1}. Another attempt was opened meanwhile; open the session again."
    )


def never_planned(job: str, attempt: int, step: int) -> str:
    """Only a step in the ledger can be delivered and committed."""
    return (
        f"step {step} of attempt {attempt} of job {job!r} was never planned, so nothing of it "
        "can be recorded. Commit only steps that this attempt has handed out."
    )
