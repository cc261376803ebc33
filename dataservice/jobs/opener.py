"""Opens jobs for the coordinator, in processes of their own: what a team wrote runs only there.

    JobOpener ──fork──► opener: job file, cost file    │ tokenizer, template, own code │ index
        ▲                                 │ numbers, paths, digests: plain data, checked here
        └─────────────────────────────────┘ then the process is killed

A template may loop for ever, a tokenizer's pattern may panic, an index may decompress to more than
fits into memory. So each of these three is read in a fresh process that has limits of time and
memory, a low priority and none of the coordinator's state; nothing of one job is left for the next.
The one that builds the pipeline runs a team's own code: it opens no storage, and has none of the
credentials with which the one behind it reads index and sources.

Contract.
  Success    the call returns what was asked for; the process has ended.
  Failure    the call raises the error that the job's files cause, whether the process reported it
             or died of it. Its message is bounded, and names the file, the limit and the remedy.
  Closing    ends every process; calls in progress raise.
"""

import contextlib
import importlib
import json
import math
import os
import resource
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np

from dataservice.core.credentials import credentials_of
from dataservice.core.errors import ServiceError, SpecError
from dataservice.core.job import JobRecord
from dataservice.core.job_limits import DEFAULT_JOB_LIMITS, JobLimits
from dataservice.core.job_setup import JobSetup
from dataservice.core.kernels import load_kernels
from dataservice.core.limits import DecodeLimits, OpeningLimits
from dataservice.core.team import team_of
from dataservice.core.visible import visible
from dataservice.jobs.late_index import LateIndexes
from dataservice.jobs.setup import (
    BuiltPipeline,
    OpenedJob,
    build_files,
    check_files,
    find_files,
    find_rows_again,
    index_pipelines,
    job_records,
    job_setup,
)
from dataservice.jobs.storage_profiles import NO_PROFILES, StorageProfiles, hold_credentials
from dataservice.sources.catalog import CatalogHead, IndexedCatalog, IndexIdentity
from dataservice.sources.catalog_handover import (
    RowFiles,
    hand_over_head,
    take_over,
    take_over_head,
)
from dataservice.sources.index_cache import NO_CACHE, IndexCache
from dataservice.sources.index_rows import IndexRows
from dataservice.workers.decoder_messages import (
    ANSWER_LIMIT_BYTES,
    Answer,
    AnswerReader,
    Kind,
    ProtocolError,
    plain_bytes,
    read_plain,
    refused,
    refusing,
    send_answer,
)
from dataservice.workers.nursery import Nursery, NurseryProcess
from dataservice.workers.nursery_program import LOWEST_PRIORITY

Result = TypeVar("Result")

MOST_NOTES, NOTE_CHARS = 20, 3000  # of a job that its owner is told
TIMES_AS_LONG = 10  # as a job may take to be opened: what is read of its index while it runs
OPENS_STORAGE = (
    "open",
    "details",
    "rows",
    "check",
)  # the orders for which nothing of a team's is run
_TOO_LARGE = (
    "the job needs more memory to open than job_opening allows. Look at its tokenizer, chat "
    "template and index; the operator may raise pipeline_memory_bytes or memory_bytes."
)


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenerProgram:
    """What the forked process does: one order, one answer."""

    custom_processors: dict[str, str]
    limits: DecodeLimits
    allowed_roots: Sequence[str] | None
    opening: OpeningLimits
    job_limits: JobLimits = DEFAULT_JOB_LIMITS
    storage_profiles: StorageProfiles = field(default_factory=dict)
    code_packages: Sequence[str] | None = None

    def __reduce__(self) -> tuple[Callable[..., "OpenerProgram"], tuple[dict[str, Any]]]:
        return _in_nursery, ({each.name: getattr(self, each.name) for each in fields(self)},)

    def __call__(self, orders: socket.socket) -> None:
        """Carry out the one order that comes."""
        order = read_plain(orders)
        if order["what"] != "rows":  # which a step waits for
            os.nice(LOWEST_PRIORITY)
        hold_credentials(order["credentials"])
        if order["what"] not in OPENS_STORAGE:
            self._limit()
        with refusing(orders, _TOO_LARGE):
            for answer in getattr(self, f"_{order['what']}")(*order["of"]):
                send_answer(orders, answer)

    def _read(self, spec_yaml: str, base_directory: str, team: str) -> Iterator[Answer]:
        records = job_records(
            spec_yaml,
            base_directory,
            team,
            allowed_roots=self.allowed_roots,
            storage_profiles=self.storage_profiles,
            code_packages=self.code_packages,
        )
        payload = json.dumps([asdict(record) for record in records]).encode()
        if len(payload) > ANSWER_LIMIT_BYTES:
            raise SpecError(
                f"the job file takes {len(payload):,} bytes with its defaults; at most "
                f"{ANSWER_LIMIT_BYTES:,} are kept. Name fewer sources, by patterns."
            )
        yield Answer(kind=Kind.INLINE, payload=payload)

    def _build(self, record: dict[str, Any]) -> Iterator[Answer]:
        built = build_files(
            JobRecord(**record),
            custom_processors=self.custom_processors,
            limits=self.limits,
            allowed_roots=self.allowed_roots,
            job_limits=self.job_limits,
            code_packages=self.code_packages,
        )
        yield Answer(kind=Kind.BUILT, payload=json.dumps(asdict(built)).encode())

    def _open(
        self,
        record: dict[str, Any],
        built: dict[str, Any],
        kept: list[str],
        folder: str | None,
    ) -> Iterator[Answer]:
        found = find_files(
            JobRecord(**record),
            BuiltPipeline(**built),
            limits=self.limits,
            allowed_roots=self.allowed_roots,
            job_limits=self.job_limits,
            storage_profiles=self.storage_profiles,
        )
        yield Answer(kind=Kind.MEMORY, descriptor=hand_over_head(found.head))
        if found.head.rows_name in kept:
            return
        if len(found.rows) > self.opening.late_index_samples:
            yield Answer(kind=Kind.MEMORY, descriptor=found.rows.lengths(folder))
        else:
            lengths, details = found.rows.read(folder)
            yield Answer(kind=Kind.MEMORY, descriptor=lengths)
            yield Answer(kind=Kind.MEMORY, descriptor=details.descriptor)

    def _details(
        self, record: dict[str, Any], identity: list[str], rows_name: str, folder: str | None
    ) -> Iterator[Answer]:
        details = self._rows_again(record, identity, rows_name).details(folder)
        yield Answer(kind=Kind.MEMORY, descriptor=details.descriptor)

    def _rows(
        self, record: dict[str, Any], identity: list[str], rows_name: str, rows: list[int]
    ) -> Iterator[Answer]:
        some = np.array(rows, dtype=np.int64)
        details = self._rows_again(record, identity, rows_name).some(some)
        yield Answer(kind=Kind.MEMORY, descriptor=details.descriptor)

    def _rows_again(self, record: dict[str, Any], identity: list[str], rows_name: str) -> IndexRows:
        return find_rows_again(
            JobRecord(**record),
            identity=IndexIdentity(*identity),
            rows_name=rows_name,
            limits=self.limits,
            allowed_roots=self.allowed_roots,
        )

    def _check(
        self,
        record: dict[str, Any],
        built: dict[str, Any],
        identity: list[str],
        verified: list[str],
    ) -> Iterator[Answer]:
        still = check_files(
            JobRecord(**record),
            BuiltPipeline(**built),
            identity=IndexIdentity(*identity),
            verified=verified,
            limits=self.limits,
            allowed_roots=self.allowed_roots,
            storage_profiles=self.storage_profiles,
        )
        yield Answer(kind=Kind.INLINE, payload=json.dumps(still).encode())

    def _limit(self) -> None:
        """Set the low limits for what a team wrote: job file, tokenizer, template and code."""
        most_s = math.ceil(sum(os.times()[:2]) + self.opening.pipeline_cpu_s)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_CPU, (most_s, resource.RLIM_INFINITY))
        _, most_bytes = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (self.opening.pipeline_memory_bytes, most_bytes))


def _in_nursery(program: dict[str, Any]) -> OpenerProgram:
    """The program as a nursery takes it up, for all processes at once: with the kernels, and with
    what Arrow loads, where that is installed, before it makes its first column."""
    load_kernels()
    with contextlib.suppress(ImportError):
        importlib.import_module("pandas")
    return OpenerProgram(**program)


class JobOpener:
    """Opens each job in a process of its own; see the module's contract. Every method blocks, and
    may be called from several threads."""

    def __init__(
        self,
        *,
        custom_processors: dict[str, str],
        limits: DecodeLimits,
        allowed_roots: Sequence[str] | None,
        opening: OpeningLimits,
        job_limits: JobLimits = DEFAULT_JOB_LIMITS,
        storage_profiles: StorageProfiles = NO_PROFILES,
        code_packages: Sequence[str] | None = None,
        cache: IndexCache = NO_CACHE,
        nursery: NurseryProcess | None = None,
    ) -> None:
        """No process runs before `start`. `cache` keeps the rows of indexes; `nursery` forks the
        processes, and may be another's too."""
        program = OpenerProgram(
            custom_processors=custom_processors,
            limits=limits,
            allowed_roots=allowed_roots,
            opening=opening,
            job_limits=job_limits,
            storage_profiles=storage_profiles,
            code_packages=code_packages,
        )
        self._program = program
        self._cache = cache
        self._late = LateIndexes(
            fetch=self._fetch, read=self._read_late, cache=cache, limits=limits
        )
        self._nursery = Nursery(
            program, name="opener", memory_bytes=opening.memory_bytes, process=nursery
        )

    def start(self) -> None:
        """Load the libraries. Raises WorkerLostError."""
        self._nursery.start()

    def close(self) -> None:
        """End every process; calls in progress raise."""
        self._nursery.refuse()
        self._nursery.close()

    def read_job(self, spec_yaml: str, base_directory: str, team: str) -> tuple[JobRecord, ...]:
        """Validate a team's job file and make the records to store: of the job, and of its
        validation where it has one. Raises SpecError, QuotaError."""
        size_bytes = len(spec_yaml.encode())
        self._program.job_limits.check("max_job_file_bytes", size_bytes, "bytes of the job file")

        def answered(answers: AnswerReader) -> bytes:
            return _next(answers, Kind.INLINE).payload

        payload = self._asked("read", [spec_yaml, base_directory, team], answered)
        return tuple(JobRecord(**record) for record in json.loads(payload))

    def read_sources(self, spec_yaml: str, base_directory: str, team: str) -> dict[str, str]:
        """Validate a team's job file, and give what a worker needs of it to index each source, by
        the source's name. Raises SpecError, QuotaError."""
        records = self.read_job(spec_yaml, base_directory, team)
        return index_pipelines(records, team, allowed_roots=self._program.allowed_roots)

    def open_job(self, record: JobRecord) -> JobSetup:
        """Open a job. Raises IndexStaleError, SourceError, SpecError, StateError, QuotaError."""
        program, built = self._program, self._built(record)
        try:
            catalog = self._catalog(record, built)
        except ServiceError:  # some are ValueErrors too, and say what is wrong themselves
            raise
        except ValueError as error:
            raise SpecError(f"job {record.name!r}: its index cannot be used: {error}.") from error
        opened = OpenedJob(catalog=catalog, identity=built.digests, notes=built.notes)
        setup = job_setup(
            record, opened, allowed_roots=program.allowed_roots, job_limits=program.job_limits
        )
        verified = list(catalog.parts.verified)
        check = partial(self._check, setup.record, catalog.identity, verified)
        return replace(setup, require_current=check)

    def _catalog(self, record: JobRecord, built: BuiltPipeline) -> IndexedCatalog:
        """The job's index, whose rows are read where they are not kept: of a large one, its lengths
        alone for now. Raises ValueError where they contradict each other."""
        limits, team = self._program.limits, team_of(record.name)
        head, files = self._found(record, built, self._cache.names(team))
        if files is None:
            kept = self._cache.find(team, head, limits)
            if kept is not None:
                return kept
            head, files = self._found(record, built, [])
            assert files is not None, "rows that are not kept are read"
        if isinstance(files, int):
            return self._late.catalog(record, head, files)
        copies = files.copied()
        try:
            catalog = take_over(head, files, limits)
        except BaseException:
            copies.close()
            raise
        self._cache.keep_soon(team, head.rows_name, copies)
        return catalog

    def _found(
        self, record: JobRecord, built: BuiltPipeline, kept: list[str]
    ) -> tuple[CatalogHead, RowFiles | int | None]:
        """What a fresh process found of the job's index, and its rows unless they are `kept`: of
        many, the descriptor of their lengths alone."""

        def answered(answers: AnswerReader) -> tuple[CatalogHead, RowFiles | int | None]:
            head = take_over_head(_next(answers, Kind.MEMORY).descriptor)
            if head.rows_name in kept:
                return head, None
            lengths = _next(answers, Kind.MEMORY).descriptor
            if sum(head.sources.sizes) > self._program.opening.late_index_samples:
                return head, lengths
            try:
                details = _next(answers, Kind.MEMORY).descriptor
            except BaseException:
                os.close(lengths)
                raise
            return head, RowFiles(lengths=lengths, details=details)

        of = [asdict(record), asdict(built), kept, self._cache.folder]
        return self._asked("open", of, answered)

    def _fetch(self, of: Sequence[object]) -> int:
        return self._asked("rows", of, _one_file)

    def _read_late(self, of: Sequence[object]) -> int:
        left_s = TIMES_AS_LONG * self._program.opening.timeout_s
        return self._asked("details", [*of, self._cache.folder], _one_file, left_s)

    def _built(self, record: JobRecord) -> BuiltPipeline:
        """What the job's pipeline is known by, as it is now."""

        def answered(answers: AnswerReader) -> BuiltPipeline:
            payload = _next(answers, Kind.BUILT).payload
            try:  # the process ran what a team wrote
                plain = json.loads(payload)
                digests = {str(name): str(digest) for name, digest in plain["digests"].items()}
                notes = tuple(
                    visible(str(note), NOTE_CHARS) for note in plain["notes"][:MOST_NOTES]
                )
                return BuiltPipeline(
                    fingerprint=str(plain["fingerprint"]), digests=digests, notes=notes
                )
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                raise ProtocolError(f"no description of a pipeline: {error}") from error

        return self._asked("build", [asdict(record)], answered)

    def _check(self, record: JobRecord, identity: IndexIdentity, verified: list[str]) -> None:
        """Check that the job's index is current. `verified` is replaced by the answer, so that a
        file whose time differs from the index's is compared once and not at each attempt."""

        def answered(answers: AnswerReader) -> list[str]:
            return list(map(str, json.loads(_next(answers, Kind.INLINE).payload)))

        built = asdict(self._built(record))
        of = [asdict(record), built, [identity.fingerprint, identity.places], verified]
        verified[:] = self._asked("check", of, answered)

    def _asked(
        self,
        what: str,
        of: Sequence[object],
        answered: Callable[[AnswerReader], Result],
        limit_s: float | None = None,
    ) -> Result:
        """The answer of a fresh process, which has ended when this returns."""
        process = self._nursery.fork()
        timeout_s = limit_s or self._program.opening.timeout_s
        answers = AnswerReader(sock=process.orders, left_s=timeout_s)
        failure: Exception | None = None
        try:
            process.orders.settimeout(timeout_s)
            credentials = credentials_of(os.environ) if what in OPENS_STORAGE else None
            order = {"what": what, "of": of, "credentials": credentials}
            process.orders.sendall(plain_bytes(order))
            return answered(answers)
        except (OSError, ProtocolError) as error:
            failure = error
        finally:
            answers.close()
            ending = self._nursery.end(process)
        raise SpecError(self._in_words(what, failure, ending)) from failure

    def _in_words(self, what: str, failure: Exception, ending: str) -> str:
        opening = self._program.opening
        if isinstance(failure, TimeoutError):
            return (
                f"the job could not be opened within {opening.timeout_s:g} s. Look at the storage "
                "of its index and sources; if it is only large, the operator may raise "
                "job_opening.timeout_s. Files whose times changed since they were indexed are read "
                "again meanwhile: `dataservice index JOB.yaml` saves that, and checkpoints fit "
                "what it makes of the same files."
            )
        if "SIGXCPU" in ending and what == "read":
            return (
                f"the job file took more than {opening.pipeline_cpu_s:g} s of CPU to read. Write a "
                "shorter one, as with patterns in the urls; the operator may raise "
                "job_opening.pipeline_cpu_s."
            )
        if "SIGXCPU" in ending:
            return (
                "the job's tokenizer, chat template or processors took more than "
                f"{opening.pipeline_cpu_s:g} s of CPU to load and try out. Look for a loop in the "
                "chat template; the operator may raise job_opening.pipeline_cpu_s."
            )
        return (
            f"the process that opened the job {ending}: {failure}. Look at the job's tokenizer, "
            "chat template and index; the service's log says more."
        )


def _one_file(answers: AnswerReader) -> int:
    return _next(answers, Kind.MEMORY).descriptor


def _next(answers: AnswerReader, kind: Kind) -> Answer:
    """The next answer, of this kind. Raises ProtocolError, OSError, and the process's own error
    where the job cannot be opened."""
    answer = answers.read((kind, Kind.REFUSED))
    if answer.kind is Kind.REFUSED:
        raise refused(answer, "the job")
    return answer
