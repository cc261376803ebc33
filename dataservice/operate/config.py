"""The service's config: one YAML file, validated here, with the flags of `serve` on top."""

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from dataservice.core.address import bare_host, is_loopback, join_address, split_address
from dataservice.core.job_limits import DEFAULT_JOB_LIMITS, JobLimits
from dataservice.core.limits import DEFAULT_LIMITS, DecodeLimits, OpeningLimits
from dataservice.core.storage_profile import StorageProfile
from dataservice.core.team import TeamSpec
from dataservice.core.tls import TlsSpec
from dataservice.jobs.expected import PORTS
from dataservice.jobs.yaml_file import Strict, Written, read_text, validated, written
from dataservice.operate.tokens_file import TeamName

ProfileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")]


class ServiceConfig(Strict):
    """The service's own config, written by the operator. Flags of `serve` override it."""

    listen: str = "127.0.0.1:50051"
    """Address of the coordinator. Use 0.0.0.0:50051 to serve other hosts, at their IPv4 and IPv6
    addresses; an IPv6 address stands in brackets, as [::1]:50051."""
    state_dir: str = "state"
    """Folder for jobs, attempts and the ledger. Keep it: recovery starts from it."""
    archive_ledger_after_days: Annotated[float, Field(gt=0)] = 1.0
    """Days after which the ledger's entries move from state.db to Parquet files beside it, where
    they take a third of the room; they are explained and replayed as before."""
    workers: Annotated[int, Field(ge=1, le=4096)] = 2
    """Number of workers that decode."""
    min_workers: Annotated[int, Field(ge=1, le=4096)] = 1
    """Number of workers with which the service starts to serve. The others are started again
    until they serve; `status` says which are missing and why."""
    slots_per_worker: Annotated[int, Field(ge=1, le=256)] = 1
    """Samples that one worker decodes at the same time; each takes one CPU."""
    decode_timeout_s: Annotated[float, Field(gt=0)] = 60.0
    """Longest time for reading and decoding one sample. A sample that takes longer is masked, and
    the process that decodes it is ended."""
    decode_memory_bytes: Annotated[int | None, Field(ge=512 * 2**20)] = 4 * 2**30
    """Private memory that one decoding process may take, including about 200 MiB for its libraries
    and tokenizers; a sample that needs more is masked. The process that reads ahead for all, and
    each that reads for a team's own code, may take as much again. null sets no limit: a chat
    template may then take all the memory of the machine."""
    limits: DecodeLimits = DEFAULT_LIMITS
    """Limits of one sample. Give `dataservice index` the same config: an index that was written
    under other limits is refused."""
    job_opening: OpeningLimits = OpeningLimits()
    """Limits of the separate process that opens a job, where the files of its team are read."""
    job_limits: JobLimits = DEFAULT_JOB_LIMITS
    """Limits of one job in the coordinator, which plans for all teams."""
    index_cache: str | None = None
    """Folder on a disk of the coordinator's machine where what was read of jobs' indexes is kept:
    a job over the same index then opens in seconds, also after a restart. It needs some 250 bytes a
    sample, and must be this user's alone. By default a folder in
    TMPDIR, or else in /var/tmp."""
    index_cache_bytes: Annotated[int, Field(ge=0)] = 64 * 2**30
    """About how many bytes `index_cache` may keep, and at most half of what its disk has for it;
    what was opened least recently goes first. 0 keeps none."""
    planning_threads: Annotated[int, Field(ge=1, le=64)] = 2
    """Number of steps that are planned at the same time. Teams share the planning time by their
    weights. With two or more threads no team occupies all of them, so a team's step never waits
    for the plans of another team."""
    held_bytes_per_worker: Annotated[int, Field(ge=2**20)] = 4 * 2**30
    """Bytes of decoded packs that a worker may hold before ranks ask for them; packs that ranks
    have asked for are not counted."""
    reads_per_worker: Annotated[int, Field(ge=1, le=1024)] = 32
    """Requests to storage on other machines that a worker has under way at once, for samples that
    come next. They occupy no decoding slot."""
    read_ahead_bytes_per_worker: Annotated[int, Field(ge=2**20)] = 256 * 2**20
    """About how many bytes of samples a worker may have read, or be reading, that no slot has
    decoded yet."""
    decoded_cache: str | None = None
    """Folder on a disk of each worker's machine where decoded samples with media are kept, for all
    its workers: another job of the same team over the same files, the next epoch and a replayed
    step find them. By default none are kept. Teams' own code neither uses it nor can change what is
    in it, but runs as the same user, who may read it."""
    decoded_cache_bytes: Annotated[int, Field(ge=2**20)] = 64 * 2**30
    """About how many bytes `decoded_cache` may take; what was used least recently goes first. An
    epoch that does not fit finds little of the one before."""
    byte_cache: str | None = None
    """Folder on a disk of each worker's machine where what was read from storage on other machines
    is kept, for all its workers: the next epoch, another job of the same team and a replayed step
    read it there. A file is asked for its entity tag or time when a worker first reads it, and then
    once a minute; without either, and of Parquet, nothing is kept. By default nothing is."""
    byte_cache_bytes: Annotated[int, Field(ge=2**20)] = 64 * 2**30
    """About how many bytes `byte_cache` may take; what was used least recently goes first. An epoch
    that does not fit finds little of the one before."""
    same_node: Annotated[str, Field(pattern=r"^(auto|off|/.+)$")] = "auto"
    """How ranks on the machine of a worker get its bytes: `auto` through memory that both map,
    where both are in one network namespace, and else over gRPC; the path of a folder that workers
    and trainers have both mounted, for the socket by which they find each other where they are in
    pods of one node; `off` always over gRPC."""
    worker_host: str = "127.0.0.1"
    """Host name or IP address at which trainers reach workers on this host; `node` stands for the
    address of each worker's own node in the Ray cluster."""
    worker_ports: Annotated[str | None, Field(pattern=PORTS)] = None
    """Range of ports that workers listen on, such as 20100-20115, for firewall rules. It needs at
    least two ports for each worker on a host. By default each worker takes any free port."""
    worker_metrics_ports: Annotated[str | None, Field(pattern=PORTS)] = None
    """Range of ports where workers serve /metrics to Prometheus, such as 20200-20203. It needs at
    least two ports for each worker on a host. By default workers serve no metrics."""
    worker_start_timeout_s: Annotated[float, Field(gt=0)] = 120.0
    """Longest time that a worker may take to start. Ray starts another process for one that has
    not come up within a minute: less leaves no time for that. A cluster that adds nodes on demand
    takes minutes."""
    pool: Literal["ray", "local"] = "ray"
    """ray runs workers as Ray actors; local runs them as threads of the coordinator."""
    ray_address: str | None = None
    """An existing Ray cluster to join; by default one is started on this machine."""
    ray_runtime_env: dict[str, Any] = Field(default={})
    """Ray's runtime environment of the workers, such as {py_modules: [code/captions.py]}, which
    carries modules of your own to every node. The service must be able to import them, too."""
    keep_workers: bool = True
    """Whether workers in an existing Ray cluster (`ray_address`) keep running when the service
    stops; the next service that starts takes them over. Workers of a Ray that the service started
    itself always end with it."""
    orphan_after_s: Annotated[float, Field(gt=0)] = 900.0
    """Time after which a worker that was kept ends itself when no service has called it."""
    idle_release_s: Annotated[float, Field(ge=0)] = 60.0
    """Time for which decoded packs are held after the last trainer of their job disconnects."""
    attempt_timeout_s: Annotated[float, Field(gt=0)] = 300.0
    """Longest time that the first ranks of an attempt wait for the last one to connect."""
    metrics_listen: str | None = None
    """Address where Prometheus scrapes metrics, such as 0.0.0.0:9090; by default none are served.
    Anyone who can reach it sees the names of jobs and sources."""
    traces: str | None = None
    """URL of the OpenTelemetry collector that receives the spans of steps, by OTLP over HTTP, such
    as http://otel:4318; by default no spans are sent. Needs the extra `traces`."""
    trace_ratio: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Fraction of steps whose spans are sent. Coordinator and workers choose the same steps."""
    unwell_after_s: Annotated[float, Field(ge=1)] = 10.0
    """Health becomes NOT_SERVING when the event loop, the state store or the service's own port
    has not answered for this time, or when every thread of one purpose has been busy with a
    single call for three times this time."""
    stop_within_s: Annotated[float, Field(ge=1)] = 45.0
    """Longest time from SIGTERM to the end of the service. What still hangs then is abandoned and
    logged, and the exit status is 6."""
    log_json: bool = False
    """Log one JSON object a line, also in the processes of workers."""
    health_listen: str | None = None
    """Address that answers only gRPC health checks, without TLS: for probes that cannot use TLS,
    such as those of Kubernetes."""
    secret_file: str | None = None
    """File with the secret shared with workers, which only its owner and group may read; by
    default the service makes one in state_dir."""
    custom_processors: dict[str, str] = Field(default={})
    """Vision processors, preparers and augmenters of samples, tokenizers and file formats, that
    jobs may use by name: name → import path `package.module:Class`."""
    code_packages: list[str] | Literal["any"] | None = None
    """Packages and modules from which jobs may also name such classes by import path; `{team}`
    stands for the job's team. With `any`, from all that can be imported. By default `any` for a
    service of this machine alone without a tokens_file, and none for others."""
    tokens_file: str | None = None
    """File with the tokens of the teams, made by `dataservice token new`; without it every caller
    is an admin. Changes take effect without a restart."""
    teams: dict[TeamName, TeamSpec] = Field(default={})
    """Weights and limits by team; a team that is not listed has weight 1 and no limits."""
    tls: TlsSpec | None = None
    """Certificates of coordinator and workers; without it nothing is encrypted."""
    insecure: bool = False
    """Serve other machines without tokens or without TLS, on a network that is trusted."""
    allowed_roots: list[str] | Literal["any"] | None = None
    """Folders and URL prefixes under which jobs may name files; `{team}` stands for the job's
    team. With `any`, a job of any team may name every file that the service can read. A service
    with a tokens_file must set this key; without one the default is `any`."""
    storage_profiles: dict[ProfileName, StorageProfile] = Field(default={})
    """Storage with credentials that jobs may name as `storage_profile` and never see, by name."""
    audit_log: str | None = None
    """File that records who changed what and who was refused, one JSON object a line."""

    @field_validator("listen", "metrics_listen", "health_listen")
    @classmethod
    def _listens_somewhere(cls, listen: str | None) -> str | None:
        # Checked here, before workers are started in vain.
        if listen is None:
            return None
        _, port = split_address(listen)
        if not port.isdecimal() or int(port) > 65535:
            raise ValueError("it must be host:port, such as 0.0.0.0:50051 or [::]:50051")
        return listen

    @field_validator("traces")
    @classmethod
    def _is_a_url(cls, traces: str | None) -> str | None:
        # Spans that go nowhere are lost without an error, so that nobody would see it.
        if traces is not None and not re.match(r"https?://[^/]", traces):
            raise ValueError("it must be a URL of http or https, such as http://otel:4318")
        return traces

    @field_validator("worker_host")
    @classmethod
    def _is_a_host_alone(cls, host: str) -> str:
        # A port would be read as part of an IPv6 address, or of a host name.
        if ":" in host and not join_address(host, 0).startswith("["):
            raise ValueError(
                "it must be a host without a port, such as 10.0.0.5 or ::1; the ports are "
                "worker_ports"
            )
        return bare_host(host)

    @field_validator("worker_ports", "worker_metrics_ports")
    @classmethod
    def _ports_are_a_range(cls, ports: str | None) -> str | None:
        first, _, last = (ports or "1-1").partition("-")
        if not 0 < int(first) <= int(last) <= 65535:
            raise ValueError("it must be a range of ports, such as 20100-20115")
        return ports

    @model_validator(mode="after")
    def _has_a_ray_for_its_environment(self) -> "ServiceConfig":
        if self.ray_runtime_env and self.pool != "ray":
            raise ValueError(
                f"there is a ray_runtime_env, and the pool is {self.pool}: without Ray nothing "
                "carries it out. Leave it out, and set PYTHONPATH; or set pool: ray"
            )
        return self

    @model_validator(mode="after")
    def _has_workers_enough(self) -> "ServiceConfig":
        if self.min_workers > self.workers:
            raise ValueError(
                f"min_workers is {self.min_workers}, and there are {self.workers} workers; it "
                "must be at most as many"
            )
        return self

    @model_validator(mode="after")
    def _has_a_port_for_each_workers_metrics(self) -> "ServiceConfig":
        # Known only where all workers are of this machine.
        if self.worker_metrics_ports is None or self.ray_address is not None:
            return self
        first, last = map(int, self.worker_metrics_ports.split("-"))
        if (ports := last - first + 1) < self.workers:
            raise ValueError(
                f"worker_metrics_ports {self.worker_metrics_ports} has {ports} port"
                f"{'s' if ports > 1 else ''}, and this machine has {self.workers} workers, of "
                "which each needs one, and a second while it is replaced. Give a range of "
                f"{2 * self.workers} ports, or fewer workers"
            )
        return self

    @property
    def roots(self) -> list[str] | None:
        """Folders and URL prefixes under which jobs may name files; None where any may be named."""
        return None if self.allowed_roots == "any" else self.allowed_roots

    @property
    def packages(self) -> list[str] | None:
        """Packages from which jobs may name classes; None where any may be named."""
        if self.code_packages is None:
            return [] if self.tokens_file is not None or self.insecure else None
        return None if self.code_packages == "any" else self.code_packages

    @model_validator(mode="after")
    def _says_what_teams_may_read(self) -> "ServiceConfig":
        if self.tokens_file is not None and self.allowed_roots is None:
            raise ValueError(
                "there is a tokens_file and no allowed_roots, so that a job of any team could "
                "name whatever this service can read. Set allowed_roots to folders and URL "
                "prefixes, such as [/data/{team}]; or to the word any, where teams are trusted "
                "with all of it"
            )
        return self

    @model_validator(mode="after")
    def _is_protected(self) -> "ServiceConfig":
        hosts = {"listen": split_address(self.listen)[0], "worker_host": self.worker_host}
        beyond = [(key, host) for key, host in hosts.items() if not is_loopback(host)]
        missing = [key for key in ("tokens_file", "tls") if getattr(self, key) is None]
        if beyond and missing and not self.insecure:
            raise ValueError(
                f"by {beyond[0][0]} it would serve other hosts at "
                f"{beyond[0][1] or 'every address'} without {' and '.join(missing)}. Set them, or "
                "insecure: true where the network itself is trusted"
            )
        return self


def read_config(path: Path | None, overrides: dict[str, Any]) -> ServiceConfig:
    """Read the config file, if any; `overrides` that are not None win. Raises SpecError."""
    given = {key: value for key, value in overrides.items() if value is not None}
    if path is None:
        return validated(ServiceConfig, Written(plain=given), "service config")
    file = written(read_text(path, "config file"), f"config file {path}")
    return validated(ServiceConfig, file.changed(given), f"service config {path}")
