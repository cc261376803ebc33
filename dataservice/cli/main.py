"""The command `dataservice`: index, serve, job, explain, status."""

import asyncio
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from dataservice.app import Service, index_job, serve_until_signal
from dataservice.cli import show
from dataservice.cli.progress import index_progress
from dataservice.core.errors import ServiceError
from dataservice.engine.api import JobStatus
from dataservice.observability.logs import configure_logging
from dataservice.serving.coordinator_client import CoordinatorClient
from dataservice.spec import JobSpec, read_config, read_job, read_text

app = typer.Typer(
    help="A balanced data-loading service for multimodal LLM training.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)
jobs = typer.Typer(help="Register and look at jobs.", no_args_is_help=True)
app.add_typer(jobs, name="job")

console = Console()

ServiceAddress = Annotated[
    str, typer.Option("--service", envvar="DATASERVICE_ADDRESS", help="host:port of the service.")
]
JobFile = Annotated[Path, typer.Argument(help="The job file (YAML).")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
ConfigFile = Annotated[Path | None, typer.Option("--config", help="The service's config (YAML).")]
DEFAULT_ADDRESS = "127.0.0.1:50051"


@app.command()
def index(
    job_file: JobFile,
    processes: Annotated[int, typer.Option(help="Files measured at once.", min=1)] = 2,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Measure every sample of a job's sources, without decoding pixels.

    Interrupted runs are resumed; files that have not changed are kept. Samples that cannot be
    used are left out, and named with the reason.

    Example: `dataservice index job.yaml --processes 8`
    """
    spec = _read_job_file(job_file)
    custom = read_config(config, {}).custom_processors
    with index_progress(Console(stderr=True)) as progress:
        summaries = index_job(
            spec, custom_processors=custom, processes=processes, progress=progress
        )
    if as_json:
        print(show.index_json(summaries))
        return
    console.print(show.index_table(summaries))
    for line in show.bad_samples(summaries, spec.index):
        console.print(line)


@app.command()
def serve(
    config: ConfigFile = None,
    listen: Annotated[str | None, typer.Option(help="host:port of the coordinator.")] = None,
    state_dir: Annotated[str | None, typer.Option(help="Folder of the durable state.")] = None,
    workers: Annotated[int | None, typer.Option(help="How many workers decode.")] = None,
    slots_per_worker: Annotated[
        int | None, typer.Option(help="Samples that a worker decodes at once.")
    ] = None,
    pool: Annotated[str | None, typer.Option(help="ray, or local (threads here).")] = None,
    ray_address: Annotated[str | None, typer.Option(help="An existing Ray cluster.")] = None,
    metrics_listen: Annotated[
        str | None, typer.Option(help="host:port where Prometheus scrapes /metrics.")
    ] = None,
    log_json: Annotated[bool, typer.Option("--log-json", help="Log JSON, an object a line.")] = (
        False
    ),
) -> None:
    """Run the coordinator and its workers until SIGTERM.

    Example: `dataservice serve --state-dir /var/lib/dataservice --workers 8`
    """
    configure_logging(json=log_json)
    overrides = {
        "listen": listen,
        "state_dir": state_dir,
        "workers": workers,
        "slots_per_worker": slots_per_worker,
        "pool": pool,
        "ray_address": ray_address,
        "metrics_listen": metrics_listen,
    }

    def ready(service: Service) -> None:
        count = len(service.pool.workers())
        if service.metrics is not None:
            console.print(f"metrics at http://{service.metrics.address}/metrics", highlight=False)
        console.print(f"serving at {service.address} with {count} workers", highlight=False)

    asyncio.run(serve_until_signal(read_config(config, overrides), ready=ready))


@app.command()
def explain(
    job: Annotated[str, typer.Argument(help="Name of the job.")],
    step: Annotated[int, typer.Option(help="The step to explain.", min=0)],
    attempt: Annotated[
        int | None, typer.Option(help="Of this attempt; by default the newest that has it.")
    ] = None,
    samples: Annotated[bool, typer.Option(help="Name every sample of every pack.")] = True,
    service: ServiceAddress = DEFAULT_ADDRESS,
    as_json: AsJson = False,
) -> None:
    """Show how a step was planned: waves, CP groups, ranks, samples, and each stage's gain.

    Example: `dataservice explain vlm-sft --step 3`
    """
    with CoordinatorClient(service) as client:
        explained = client.explain(job, step, attempt)
    if as_json:
        print(show.explained_json(explained))
        return
    for part in show.explained_tables(explained, name_samples=samples):
        console.print(part)


@app.command()
def status(service: ServiceAddress = DEFAULT_ADDRESS, as_json: AsJson = False) -> None:
    """Show all jobs and where they stand.

    Example: `dataservice status --service trainer-data:50051`
    """
    _list_jobs(service, as_json)


@jobs.command()
def submit(
    job_file: JobFile, service: ServiceAddress = DEFAULT_ADDRESS, as_json: AsJson = False
) -> None:
    """Register a job. The same file again changes nothing.

    Example: `dataservice job submit job.yaml`
    """
    text = read_text(job_file, "job file")
    with CoordinatorClient(service) as client:
        status = client.submit(text, str(job_file.parent.absolute()))
    _print_jobs([status], as_json)


@jobs.command("list")
def list_jobs(service: ServiceAddress = DEFAULT_ADDRESS, as_json: AsJson = False) -> None:
    """List all jobs. Example: `dataservice job list --json`"""
    _list_jobs(service, as_json)


@jobs.command("show")
def show_job(job: str, service: ServiceAddress = DEFAULT_ADDRESS, as_json: AsJson = False) -> None:
    """Show one job and which samples were masked. Example: `dataservice job show vlm-sft`"""
    with CoordinatorClient(service) as client:
        status, masked = client.job(job), client.quarantine(job)
    if as_json:
        print(show.job_json(status, masked))
        return
    console.print(show.job_table([status]))
    for line in show.masked_samples(masked):
        console.print(line)


@jobs.command()
def drain(job: str, service: ServiceAddress = DEFAULT_ADDRESS, as_json: AsJson = False) -> None:
    """Refuse new attempts; let the running one finish. Example: `dataservice job drain vlm-sft`"""
    with CoordinatorClient(service) as client:
        _print_jobs([client.drain(job)], as_json)


@jobs.command()
def delete(job: str, service: ServiceAddress = DEFAULT_ADDRESS) -> None:
    """Forget a job that no trainer uses. Example: `dataservice job delete vlm-sft`"""
    with CoordinatorClient(service) as client:
        client.delete(job)
    console.print(f"deleted {job}", highlight=False)


def _list_jobs(service: str, as_json: bool) -> None:
    with CoordinatorClient(service) as client:
        _print_jobs(client.jobs(), as_json)


def _print_jobs(statuses: list[JobStatus], as_json: bool) -> None:
    if as_json:
        print(show.jobs_json(statuses))
    else:
        console.print(show.job_table(statuses))


def _read_job_file(path: Path) -> JobSpec:
    return read_job(read_text(path, "job file"), path.parent.absolute())


def main() -> None:
    """Run the command. Deliberate errors are printed without a traceback and exit 1."""
    try:
        app()
    except ServiceError as error:
        Console(stderr=True).print(
            f"[bold red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True
        )
        sys.exit(1)


if __name__ == "__main__":
    main()
