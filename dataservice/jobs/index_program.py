"""What a worker's process for an index runs: one errand over one source of a job.

It reads below the roots and by the storage profiles of the job's team, as a service does that opens
the job. Of own code it runs what the job names, and then has no credentials.
"""

import json
import os
import socket
import time
from dataclasses import dataclass, field
from functools import partial

from dataservice.core.errors import SpecError
from dataservice.core.limits import DEFAULT_LIMITS, DecodeLimits
from dataservice.core.ports import SampleMeasurer
from dataservice.jobs.own_formats import format_codes
from dataservice.jobs.sample_pipeline import IndexedJob, indexed_job, pipeline_of
from dataservice.jobs.storage_profiles import (
    StorageProfiles,
    hold_credentials,
    opened_sources,
)
from dataservice.sources.file_indexer import IndexTask, MakeMeasurer
from dataservice.sources.filesystem import is_far
from dataservice.sources.index_errands import Errand, Finding, carry_out
from dataservice.sources.manifest import Recipe
from dataservice.workers.decoder_messages import (
    MESSAGE_LIMIT,
    Answer,
    Kind,
    read_plain,
    refusing,
    send_answer,
)
from dataservice.workers.nursery_program import LOWEST_PRIORITY

TOLD_EVERY_S = 0.25
_TOO_LARGE = (
    "measuring a sample of the source needs more memory than decode_memory_bytes allows. Leave it "
    "out or make it smaller; the operator may raise decode_memory_bytes."
)


@dataclass(frozen=True, kw_only=True, slots=True)
class IndexProgram:
    """The whole life of the process."""

    custom_processors: dict[str, str]
    limits: DecodeLimits = DEFAULT_LIMITS
    storage_profiles: StorageProfiles = field(default_factory=dict)
    niceness: int = LOWEST_PRIORITY

    def __call__(self, orders: socket.socket) -> None:
        """Carry out the one order that comes."""
        order = read_plain(orders)
        os.nice(self.niceness)
        hold_credentials(order["credentials"])
        told = _Told(orders)
        with refusing(orders, _TOO_LARGE):
            errand = Errand.from_json(order["errand"])
            job = indexed_job(order["pipeline"])
            for finding in carry_out(errand, self._task(job, errand), told):
                told.tell()
                _send(orders, finding)
            told.tell()
            send_answer(orders, Answer(kind=Kind.DONE))

    def _task(self, job: IndexedJob, errand: Errand) -> IndexTask:
        if job.runs_code and is_far(job.source.url):
            raise SpecError(
                f"source {job.source.name!r} lies on another machine, at {job.source.url!r}, and "
                "the job runs code of its own, which a service does not give the credentials of "
                "storage. Index it where you run that code: `dataservice index` without --on."
            )
        codes = format_codes([job.source], self.custom_processors)
        (opened,) = opened_sources([job.source], self.storage_profiles, job.team, codes=codes)
        make: MakeMeasurer = partial(
            pipeline_of, job.pipeline, self.custom_processors, self.limits, roots=job.roots
        )
        fingerprint = ""  # of what needs none
        if errand.measures:
            measurer = make()
            fingerprint, make = measurer.fingerprint, partial(_same, measurer)
        return IndexTask(
            spec=opened,
            recipe=Recipe.of(opened, fingerprint),
            make_measurer=make,
            limits=self.limits,
            roots=job.roots,
        )


def run_index_program(
    custom_processors: dict[str, str],
    limits: DecodeLimits,
    storage_profiles: StorageProfiles,
    orders: socket.socket,
) -> None:
    """An `IndexProgram` of these settings, for who names it before it is loaded."""
    IndexProgram(
        custom_processors=custom_processors, limits=limits, storage_profiles=storage_profiles
    )(orders)


def _same(measurer: SampleMeasurer) -> SampleMeasurer:
    return measurer


@dataclass(slots=True)
class _Told:
    """Tells how far it is, at intervals."""

    orders: socket.socket
    rows: int = 0
    size_bytes: int = 0
    last_s: float = 0.0

    def add(self, rows: int, size_bytes: int) -> None:
        """Count more as done."""
        self.rows += rows
        self.size_bytes += size_bytes
        if time.monotonic() - self.last_s > TOLD_EVERY_S:
            self.tell()

    def tell(self) -> None:
        """Tell now."""
        payload = json.dumps([self.rows, self.size_bytes]).encode()
        send_answer(self.orders, Answer(kind=Kind.INLINE, payload=payload))
        self.rows = self.size_bytes = 0
        self.last_s = time.monotonic()


def _send(orders: socket.socket, finding: Finding) -> None:
    """Send a finding, and close its descriptor."""
    kind = Kind.BAD if finding.descriptor < 0 else Kind.MEMORY
    payload = json.dumps([finding.place, finding.damage[:MESSAGE_LIMIT]]).encode()
    try:
        send_answer(orders, Answer(kind=kind, payload=payload, descriptor=finding.descriptor))
    finally:
        if finding.descriptor >= 0:
            os.close(finding.descriptor)
