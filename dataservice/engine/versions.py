"""The versions of a job's file: what each changed, and the job set up under each.

All versions of a job train the same samples in the same order, and newer ones may have sources and
changes of the mixture behind those of the older; any other file is refused when it is submitted. So
the catalog of the newest serves them all, and a step that was planned under an older version is
planned again under that version. Functions that read the store are to be called in threads.
"""

import hashlib
import json
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from dataservice.core.errors import NotFoundError
from dataservice.core.job import JobRecord, MixtureChange, MixtureRecord
from dataservice.core.job_setup import CostChange, JobSetup
from dataservice.core.plan_options import CostModel
from dataservice.core.state_store import StateStore
from dataservice.core.validation import validated_by
from dataservice.engine.api import JobVersion
from dataservice.engine.spec_changes import (
    SpecChange,
    cost_of,
    in_words,
    misgrown,
    spec_changes,
)

ReadCost = Callable[[str], CostModel]
SetupOf = Callable[[int], JobSetup]
"""The job as an attempt of this number had it."""
MOST_VERSIONS = 256
"""Versions of a job's file that are kept."""


def with_changes(setup: JobSetup, store: StateStore, read_cost: ReadCost) -> JobSetup:
    """The setup of a version with the costs and weights that take over in it."""
    job = setup.record
    weights = mixture_changes(store.mixtures(job.name))
    if weights:
        setup = replace(setup, stream=setup.stream.changed(weights))
    specs = {spec.version: spec.spec_json for spec in store.specs(job.name)}
    specs[job.spec_version] = job.spec_json  # it may be about to be stored
    since = _cost_since([specs[v] for v in sorted(specs) if v <= job.spec_version])
    changes = tuple(
        CostChange(from_step=record.from_step, cost=read_cost(record.cost_json))
        for record in store.costs(job.name)
        if record.spec_version >= since
    )
    return replace(setup, cost_changes=changes)


def mixture_changes(records: Iterable[MixtureRecord]) -> dict[str, MixtureChange]:
    """Recorded changes of the mixture by the names that places call them by, which tell apart those
    of a job of the same name that was deleted."""
    return {
        f"r{record.number}-{_short_digest(record.change_json)}": MixtureChange(
            **json.loads(record.change_json)
        )
        for record in records
    }


def _short_digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=3).hexdigest()


def _cost_since(specs: Sequence[str]) -> int:
    """The version that brought the coefficients of the last of these `specs` of versions 1, 2, …:
    it has replaced the changes of cost that were recorded before it."""
    since, newest = len(specs), cost_of(specs[-1])
    while since > 1 and cost_of(specs[since - 2]) == newest:
        since -= 1
    return since


def revised(newest: JobSetup, version: int, store: StateStore, read_cost: ReadCost) -> JobSetup:
    """The job under an older version of its file, over the data of the newest. Raises NotFoundError
    where there is no such version, SpecError where its file is no longer valid."""
    record = newest.record
    specs = {spec.version: spec for spec in store.specs(record.name)}
    if version not in specs:
        raise NotFoundError(
            f"job {record.name!r} has no version {version} of its job file; it has "
            f"{sorted(specs)}. Restore the state directory that its attempts were recorded in."
        )
    older = replace(record, spec_version=version, spec_json=specs[version].spec_json)
    return with_changes(newest.revise(newest, older), store, read_cost)


class VersionHistory:
    """What each version of a job's file changed, in words: two are compared once, which for files
    of many sources takes long. Safe for use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: list[JobVersion] = []  # without their attempts
        self._newest = ""  # its file

    def versions(self, store: StateStore, job: str) -> tuple[JobVersion, ...]:
        """Every version, and which attempts began with it; none where the job was deleted
        meanwhile."""
        began: dict[int, list[int]] = {}
        for attempt in store.attempts(job):
            began.setdefault(attempt.spec_version, []).append(attempt.attempt)
        found = []
        for each in self._compared(store, job):
            attempts = began.get(each.version, [0])
            found.append(replace(each, first_attempt=attempts[0], last_attempt=attempts[-1]))
        return tuple(found)

    def _compared(self, store: StateStore, job: str) -> list[JobVersion]:
        with self._lock:
            behind = self._known[-1].version if self._known else 0
            for spec in store.specs(job, behind=behind):
                changes = spec_changes(self._newest, spec.spec_json) if self._known else ()
                self._known.append(
                    JobVersion(
                        version=spec.version,
                        submitted_unix_s=spec.submitted_unix_s,
                        changes=in_words(changes),
                    )
                )
                self._newest = spec.spec_json
            return list(self._known)


def other_data(record: JobRecord, submitted: JobRecord, changes: Sequence[SpecChange]) -> str:
    """Why a job file cannot be a version of this job."""
    data = [change for change in changes if change.of_data]
    if validated_by(record.name) is not None:
        return (
            "passes over it were begun, and this file would validate on other samples, in another "
            f"order, or decode them otherwise. It differs in {in_words(data)}. Restore what "
            "differs and submit the file again; or forget those passes with `dataservice job "
            f"delete {record.name}`, which leaves training as it is, and then submit it: a pass "
            "that a checkpoint holds half done will be refused."
        )
    grown = misgrown(record.spec_json, submitted.spec_json)
    return (
        f"this file is not that of job {record.name!r} any more: it would train other samples, in "
        f"another order, or decode them otherwise. {f'{grown} ' if grown else ''}It differs in "
        f"{in_words(data)}; what is compared is the content of sources, index and tokenizer, "
        "wherever they lie. Checkpoints of the job would not fit. Restore what differs and submit "
        "it again; or submit the file under another name, as a run from the beginning. (To delete "
        "the job would take its ledger, skips and quarantine along, and its checkpoints would be "
        "refused.)"
    )
