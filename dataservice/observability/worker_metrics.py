"""The series of one worker, read from it at each scrape.

A worker's process is scraped by itself: the coordinator counts the packs that it has receipts of, a
worker what it has done and holds. Each process shows its own worker alone, under its name.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from dataservice.core.errors import TICKET_FAULTS
from dataservice.observability.metrics import NAMESPACE

Family = GaugeMetricFamily | CounterMetricFamily
PATHS = ("grpc", "same_node")


class TeamCounts(Protocol):
    """A team's samples that wait for a slot, and the seconds that slots have spent for it."""

    @property
    def team(self) -> str: ...
    @property
    def queued(self) -> int: ...
    @property
    def decode_s(self) -> float: ...


class Outage(Protocol):
    """A job's source whose storage does not answer, and for how long."""

    @property
    def job(self) -> str: ...
    @property
    def source(self) -> str: ...
    @property
    def away_s(self) -> float: ...


class WorkerCounts(Protocol):
    """A worker's packs now, and its work since it started; see workers.host.HostStats."""

    @property
    def packs_pending(self) -> int: ...
    @property
    def packs_waiting(self) -> int: ...
    @property
    def packs_ready(self) -> int: ...
    @property
    def held_bytes(self) -> int: ...
    @property
    def samples_decoded(self) -> int: ...
    @property
    def samples_masked(self) -> int: ...
    @property
    def samples_reused(self) -> int: ...
    @property
    def decode_s(self) -> float: ...
    @property
    def reads(self) -> int: ...
    @property
    def read_ahead_bytes(self) -> int: ...
    @property
    def samples_read_ahead(self) -> int: ...
    @property
    def ranges_found(self) -> int: ...
    @property
    def ranges_missed(self) -> int: ...
    @property
    def range_bytes_found(self) -> int: ...
    @property
    def outages(self) -> Sequence[Outage]: ...
    @property
    def teams(self) -> Sequence[TeamCounts]: ...


def worker_registry(
    worker: str,
    *,
    slots: int,
    read: Callable[[], WorkerCounts],
    refused: Mapping[str, int] = MappingProxyType({}),
    sent: Mapping[str, int] = MappingProxyType({}),
) -> CollectorRegistry:
    """The series of this worker. The thread of each scrape calls `read`, and looks into `refused`,
    which counts tickets by their fault, and `sent`, which counts bytes by their path."""
    registry = CollectorRegistry()
    registry.register(_WorkerSeries(worker, slots, read, refused, sent))
    return registry


class _WorkerSeries(Collector):
    def __init__(
        self,
        worker: str,
        slots: int,
        read: Callable[[], WorkerCounts],
        refused: Mapping[str, int],
        sent: Mapping[str, int],
    ) -> None:
        self._worker = worker
        self._slots = slots
        self._read = read
        self._refused = refused
        self._sent = sent

    def describe(self) -> Iterable[Family]:
        """The series without their values."""
        return _families().values()

    def collect(self) -> Iterable[Family]:
        """The series as they are."""
        now, worker, found = self._read(), self._worker, _families()
        waiting = now.packs_waiting
        for state, packs in (
            ("waiting", waiting),
            ("decoding", now.packs_pending - waiting),
            ("ready", now.packs_ready),
        ):
            found["packs"].add_metric([worker, state], packs)
        for name, value in (
            ("decoding_slots", self._slots),
            ("held_bytes", now.held_bytes),
            ("samples", now.samples_decoded),
            ("masked_samples", now.samples_masked),
            ("reused_samples", now.samples_reused),
            ("decode_seconds", now.decode_s),
            ("reads", now.reads),
            ("read_ahead_bytes", now.read_ahead_bytes),
            ("read_ahead_samples", now.samples_read_ahead),
            ("cached_reads", now.ranges_found),
            ("uncached_reads", now.ranges_missed),
            ("cached_bytes", now.range_bytes_found),
        ):
            found[name].add_metric([worker], value)
        for outage in now.outages:
            found["storage_away_seconds"].add_metric(
                [worker, outage.job, outage.source], outage.away_s
            )
        for load in now.teams:
            found["team_queued_samples"].add_metric([worker, load.team], load.queued)
            found["team_decode_seconds"].add_metric([worker, load.team], load.decode_s)
        for fault in TICKET_FAULTS:
            found["refused_tickets"].add_metric([worker, fault], self._refused.get(fault, 0))
        for path in PATHS:
            found["sent_bytes"].add_metric([worker, path], self._sent.get(path, 0))
        return found.values()


def _families() -> dict[str, Family]:
    def gauge(name: str, text: str, *labels: str) -> Family:
        return GaugeMetricFamily(f"{NAMESPACE}_worker_{name}", text, labels=["worker", *labels])

    def counter(name: str, text: str, *labels: str) -> Family:
        return CounterMetricFamily(f"{NAMESPACE}_worker_{name}", text, labels=["worker", *labels])

    return {
        "packs": gauge("packs", "Packs ordered: waiting for room, decoding, or ready.", "state"),
        "decoding_slots": gauge("decoding_slots", "Samples that the worker decodes at once."),
        "held_bytes": gauge("held_bytes", "Size of the packs that are ready."),
        "samples": counter("samples", "Samples decoded, masked ones included."),
        "masked_samples": counter("masked_samples", "Samples decoded as masked."),
        "reused_samples": counter(
            "reused_samples", "Samples that had been decoded before, and were found."
        ),
        "decode_seconds": counter("decode_seconds", "Time that slots spent reading and decoding."),
        "reads": gauge("reads", "Requests to storage under way, beside those of slots."),
        "read_ahead_bytes": gauge(
            "read_ahead_bytes", "Size of samples being read, or read and waiting for a slot."
        ),
        "read_ahead_samples": counter(
            "read_ahead_samples", "Samples that were read before they had a slot."
        ),
        "cached_reads": counter(
            "cached_reads", "Reads from other machines that were found on this one's disk."
        ),
        "uncached_reads": counter(
            "uncached_reads", "Reads from other machines that were looked for and not found."
        ),
        "cached_bytes": counter("cached_bytes", "Size of the reads that were found."),
        "storage_away_seconds": gauge(
            "storage_away_seconds",
            "Time for which a source's storage has not answered; its samples wait.",
            "job",
            "source",
        ),
        "team_queued_samples": gauge(
            "team_queued_samples", "Samples of a team that wait for a slot.", "team"
        ),
        "team_decode_seconds": counter(
            "team_decode_seconds", "Time that slots spent for a team.", "team"
        ),
        "refused_tickets": counter(
            "refused_tickets", "Tickets of ranks that were refused.", "fault"
        ),
        "sent_bytes": counter(
            "sent_bytes",
            "Size of the parts sent to ranks: by gRPC, or by memory to ranks of the same machine.",
            "path",
        ),
    }
