"""The command `dataservice`: index, preview, serve, job, workers, layout, calibrate, explain and
status."""

import json
import logging
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.markup import escape

from dataservice.cli import show, show_records
from dataservice.cli.connection import Connect, JobName, connected, may_connect, step_or_sample
from dataservice.cli.explain import explain
from dataservice.cli.layout import lay_out
from dataservice.cli.preview import preview
from dataservice.cli.progress import asking, index_progress, measuring_progress, starting
from dataservice.cli.records import quarantine, replay, skip
from dataservice.cli.show_mixture import mixture_fields, mixture_shown, weights_of
from dataservice.cli.status import status
from dataservice.cli.terminal import Terminal
from dataservice.cli.tokens import tokens
from dataservice.cli.workers import workers as workers_commands
from dataservice.core import garbage
from dataservice.core.errors import ServiceError, SpecError
from dataservice.core.mixture_tree import MixtureTree
from dataservice.engine.api import JobStatus
from dataservice.jobs.yaml_file import read_text
from dataservice.observability.logs import configure_logging
from dataservice.serving.coordinator_client import CoordinatorClient

# Modules that load the planner, codecs, storage or Ray take a second or two to import. Only the
# commands that need them import them; the others, and completion in a shell, answer at once.
if TYPE_CHECKING:
    from dataservice.app import Service
    from dataservice.jobs.job_file import JobFile
    from dataservice.operate.config import ServiceConfig
    from dataservice.sources.index import IndexSummary
    from dataservice.sources.shared_indexing import Elsewhere

log = logging.getLogger(__name__)

app = typer.Typer(
    help="A balanced data-loading service for multimodal LLM training.\n\n"
    "Example: `dataservice status --watch`",
    epilog="Exit status: 0 done; 1 refused or failed, with the reason; 2 a mistake in the command; "
    "3 a plan made again, or what is delivered again, is not the recorded one; 4 a job is "
    "stalled, 5 the service does not answer or does not work (`status --check`); 6 something was "
    "left undone to stop in time (`serve`). `--install-completion` makes your shell complete "
    "commands and options.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)
jobs = typer.Typer(
    help="Register and look at jobs. Example: `dataservice job list`", no_args_is_help=True
)
app.add_typer(jobs, name="job")
for command in (skip, replay, quarantine):
    jobs.command()(command)
app.add_typer(tokens, name="token")
app.add_typer(workers_commands, name="workers")

console = Terminal()
DRY_ROWS = 20
PROCESSES = 2

Where = Literal["here", "service"]
JobFilePath = Annotated[Path, typer.Argument(help="The job file (YAML).")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
ConfigFile = Annotated[Path | None, typer.Option("--config", help="The service's config (YAML).")]


@app.command()
@may_connect
def index(
    connecting: Connect,
    job_file: JobFilePath,
    on: Annotated[
        Where,
        typer.Option(
            help="Who reads and measures the files: this machine, or the workers of the service. "
            "The index is written by this command."
        ),
    ] = "here",
    processes: Annotated[
        int | None,
        typer.Option(
            help="Number of files measured at once; by default 2 here, and with --on service as "
            "many as the service lets the team.",
            min=1,
        ),
    ] = None,
    leave_out_damaged: Annotated[
        bool,
        typer.Option("--leave-out-damaged", help="Leave damaged files out of the index."),
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Measure the beginning of each file, and write nothing."),
    ] = False,
    rows: Annotated[
        int | None,
        typer.Option(help=f"Samples of each file for --dry-run; by default {DRY_ROWS}.", min=1),
    ] = None,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Measure every sample of a job's sources, held-out ones too, without decoding pixels, and show
    its mixture.

    An interrupted run is resumed; files that have not changed are not read again. Samples that
    cannot be used are left out and named with the reason. Damaged files do not stop the run: all
    of them are named at the end, and the command fails unless --leave-out-damaged is given. With
    --dry-run, the first samples of each file are measured and summarised, and no index is written.

    With --on service, workers of the service measure, beside training and at the lowest priority.
    They read what the service may read for the job's team, as when the job is submitted; a worker
    that dies costs the part of a file that it was at.

    Example: `dataservice index job.yaml --processes 8`
    """
    from dataservice.jobs.indexing import IndexIncompleteError, index_job
    from dataservice.jobs.mixture import mixture_of_summaries
    from dataservice.operate.config import read_config

    spec = _read_job_file(job_file)
    settings = read_config(config, {})
    if dry_run:
        if on == "service":
            raise SpecError("--dry-run measures on this machine. Leave --on service out.")
        _dry_run(spec, settings, rows or DRY_ROWS, processes or PROCESSES, as_json)
        return
    if rows is not None:
        raise SpecError("--rows is for --dry-run: an index has every sample. Add --dry-run.")
    try:
        with (
            _elsewhere(on, connecting, job_file, processes) as elsewhere,
            index_progress(Terminal(stderr=True)) as progress,
        ):
            summaries = index_job(
                spec,
                custom_processors=settings.custom_processors,
                processes=processes or PROCESSES,
                progress=progress,
                limits=settings.limits,
                storage_profiles=settings.storage_profiles,
                leave_out_damaged=leave_out_damaged,
                elsewhere=elsewhere,
            )
    except IndexIncompleteError as error:
        _print_indexed(error.made, spec.index, as_json)
        raise
    _print_indexed(summaries, spec.index, as_json)
    if not as_json:
        for job in spec.jobs:
            _print_mixture(job.job, mixture_of_summaries(job, summaries))


@contextmanager
def _elsewhere(
    on: Where, connecting: Connect, job_file: Path, processes: int | None
) -> Iterator["Callable[[str], Elsewhere] | None"]:
    """Who indexes a source of this name in place of this process."""
    if on == "here":
        yield None
        return
    from dataservice.cli.service_indexing import ServiceIndexing

    text, base = read_text(job_file, "job file"), str(job_file.parent.absolute())
    with connecting() as client:
        listed = set[str]()

        def indexing(source: str) -> ServiceIndexing:
            waits = bool(listed)  # who names a service that is not there is told at once
            listed.add(source)
            return ServiceIndexing(client, text, base, source, processes, waits=waits)

        yield indexing


def _dry_run(
    spec: "JobFile", settings: "ServiceConfig", rows: int, processes: int, as_json: bool
) -> None:
    from dataservice.cli import show_index
    from dataservice.jobs.dry_run import dry_run
    from dataservice.jobs.indexing import IndexIncompleteError

    with index_progress(Terminal(stderr=True)) as progress:
        done = dry_run(
            spec,
            samples_per_file=rows,
            custom_processors=settings.custom_processors,
            processes=processes,
            progress=progress,
            limits=settings.limits,
            storage_profiles=settings.storage_profiles,
        )
    if as_json:
        print(show_index.dry_run_json(done))
    else:
        _print_summaries(done.summaries, None)
        console.print(show_index.dry_run_line(done), highlight=False, soft_wrap=True)
    if done.problem:
        raise IndexIncompleteError(done.problem, done.summaries)


def _print_indexed(summaries: "Sequence[IndexSummary]", index_dir: str, as_json: bool) -> None:
    from dataservice.cli import show_index

    if as_json:
        print(show_index.index_json(summaries))
    else:
        _print_summaries(summaries, index_dir)


def _print_summaries(summaries: "Sequence[IndexSummary]", index_dir: str | None) -> None:
    from dataservice.cli import show_index

    console.print(show_index.index_table(summaries))
    told = (
        *show_index.taken_up(summaries),
        *show_index.cut(summaries),
        *show_index.unlearnt(summaries),
    )
    for line in (*told, *show_index.left_out(summaries, index_dir)):
        console.print(line, highlight=False, soft_wrap=True)


app.command()(preview)


@app.command()
def serve(
    config: ConfigFile = None,
    listen: Annotated[str | None, typer.Option(help="host:port of the coordinator.")] = None,
    state_dir: Annotated[str | None, typer.Option(help="Folder for the durable state.")] = None,
    workers: Annotated[int | None, typer.Option(help="Number of workers that decode.")] = None,
    slots_per_worker: Annotated[
        int | None, typer.Option(help="Samples that one worker decodes at once.")
    ] = None,
    pool: Annotated[
        str | None, typer.Option(help="ray, or local (threads in one process).")
    ] = None,
    ray_address: Annotated[str | None, typer.Option(help="An existing Ray cluster.")] = None,
    keep_workers: Annotated[
        bool | None,
        typer.Option(
            "--keep-workers/--stop-workers",
            help="Whether workers in an existing Ray cluster keep running when the service stops.",
        ),
    ] = None,
    metrics_listen: Annotated[
        str | None, typer.Option(help="host:port where Prometheus scrapes /metrics.")
    ] = None,
    insecure: Annotated[
        bool | None,
        typer.Option("--insecure", help="Serve other hosts without tokens or TLS."),
    ] = None,
    log_json: Annotated[
        bool | None, typer.Option("--log-json", help="Log one JSON object a line.")
    ] = None,
) -> None:
    """Run the coordinator and its workers until SIGTERM.

    Example: `dataservice serve --state-dir /var/lib/dataservice --workers 8`
    """
    from dataservice.operate.config import read_config

    overrides = {
        "listen": listen,
        "state_dir": state_dir,
        "workers": workers,
        "slots_per_worker": slots_per_worker,
        "pool": pool,
        "ray_address": ray_address,
        "keep_workers": keep_workers,
        "metrics_listen": metrics_listen,
        "insecure": insecure,
        "log_json": log_json,
    }
    settings = read_config(config, overrides)
    configure_logging(json=settings.log_json)
    tell = starting(Terminal(stderr=True), as_log=settings.log_json)
    from dataservice.app import run_service

    def ready(service: "Service") -> None:
        if service.metrics is not None:
            console.print(f"metrics at http://{service.metrics.address}/metrics", highlight=False)
        console.print(f"serving at {service.address} while the workers start", highlight=False)

    def staffed(service: "Service") -> None:
        workers = f"{len(service.pool.workers())} of {settings.workers} workers"
        console.print(f"serving with {workers}", highlight=False)

    try:
        run_service(settings, ready=ready, staffed=staffed, tell=tell)
    except ServiceError as error:
        if not settings.log_json:
            raise
        log.error("%s", error)  # a log store would lose why the service has ended
        raise typer.Exit(1) from error


app.command("layout")(lay_out)


@app.command("calibrate")
def calibrate_model(
    model: Annotated[
        str | None, typer.Option(help="Import path package.module:build of your MultimodalModel.")
    ] = None,
    ranks: Annotated[int, typer.Option(help="Number of processes on this host.", min=1)] = 4,
    out: Annotated[Path, typer.Option(help="The cost file to write.")] = Path("cost.yaml"),
    job_file: Annotated[
        Path | None, typer.Option("--job", help="Job file whose encoders are measured.")
    ] = None,
    lengths: Annotated[str, typer.Option(help="Decoder tokens, such as 512,1024,2048.")] = "",
    item_tokens: Annotated[str, typer.Option(help="Sizes of an item in encoder tokens.")] = "",
    degrees: Annotated[str, typer.Option(help="CP degrees; by default all up to --ranks.")] = "",
    repeats: Annotated[int | None, typer.Option(help="Repeats of each measurement.", min=1)] = None,
    dtype: Annotated[str | None, typer.Option(help="Weights, such as bfloat16.")] = None,
    device: Annotated[
        str | None, typer.Option(help="cpu or cuda; by default cuda where there is one.")
    ] = None,
    wrapped: Annotated[
        bool,
        typer.Option(
            help="The trainer wraps the model in DDP or FSDP2, whose sum of gradients overlaps "
            "with the backward pass: it is taken to cost nothing."
        ),
    ] = False,
    layers: Annotated[
        Path | None,
        typer.Option(help="Measure each layer too, and write their seconds and bytes here."),
    ] = None,
    measurements: Annotated[
        Path | None,
        typer.Option(help="Fit this file, written by torchrun -m trainer_client.runtime.measure."),
    ] = None,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Measure a model by length and CP degree, and fit the cost model that plans use.

    Prints the coefficients and their errors on held-out lengths, and writes a file that a job
    names as `plan: {cost: cost.yaml}`.

    Example: `dataservice calibrate --model demo.model:DemoModel --ranks 4 --out cost.yaml`
    """
    from dataservice.jobs import calibrate
    from dataservice.jobs.cost_file import write_cost_file
    from dataservice.jobs.layer_file import write_layer_file
    from dataservice.jobs.own_code import load_processors
    from dataservice.operate.config import read_config

    if (model is None) == (measurements is None):
        raise SpecError("give either --model to measure it, or --measurements that were made.")
    for flag, path in (("--out", out), ("--layers", layers)):
        if path is not None and not path.absolute().parent.is_dir():
            raise SpecError(f"{flag} {path} is in a folder that does not exist. Make it first.")
    with tempfile.TemporaryDirectory() as folder:
        source = measurements or Path(folder) / "measurements.json"
        if model is not None:
            custom = load_processors(read_config(config, {}).custom_processors)
            encoders = (
                calibrate.modalities_of(_read_job_file(job_file), custom) if job_file else None
            )
            options = calibrate.MeasuringOptions(
                model=model,
                ranks=ranks,
                lengths=_numbers("--lengths", lengths),
                item_tokens=_numbers("--item-tokens", item_tokens),
                degrees=_numbers("--degrees", degrees),
                modalities=encoders,
                repeats=repeats,
                dtype=dtype,
                device=device,
                wrapped=wrapped,
                layers=layers is not None,
            )
            with measuring_progress(Terminal(stderr=True)) as tell:
                calibrate.measure_model(options, source, tell=tell)
        measured = calibrate.read_measurements(source)
    made = calibrate.calibrate(measured)
    if layers is not None:
        write_layer_file(layers, calibrate.calibrate_layers(measured))
    write_cost_file(out, made.file)
    if as_json:
        print(show.calibration_json(made, out))
        return
    for part in show.calibration_tables(made):
        console.print(part)
    if layers is not None:
        console.print(f"wrote {layers}, each layer", highlight=False)
    console.print(f"wrote {out}, version {made.file.cost.model.version}", highlight=False)


app.command()(explain)
app.command()(status)


@jobs.command()
@connected
def submit(
    client: CoordinatorClient,
    job_file: JobFilePath,
    wait_s: Annotated[
        float, typer.Option(min=0, help="Longest wait for a service that is starting, in seconds.")
    ] = 20.0,
    as_json: AsJson = False,
) -> None:
    """Register a job with its validation, or change the batch, plan, epochs, budgets and topology
    of one.

    Changes apply to attempts that begin from now on. The samples and their order stay. Submitting
    the same file again changes nothing, except that a drained job takes new attempts again.

    Example: `dataservice job submit job.yaml`
    """
    text = read_text(job_file, "job file")
    with asking("waiting for the service to listen"):
        client.await_service(wait_s)
    with asking("opening the job's index at the service"):
        submitted = client.submit(text, str(job_file.parent.absolute()))
    _print_jobs(submitted.with_validation, as_json)
    if not as_json:
        for line in (*show_records.pending_lines(submitted), *show_records.note_lines(submitted)):
            console.print(line)


@jobs.command("list")
@connected
def list_jobs(client: CoordinatorClient, as_json: AsJson = False) -> None:
    """List all jobs. Example: `dataservice job list --json`"""
    _print_jobs(client.jobs(), as_json)


@jobs.command("show")
@connected
def show_job(client: CoordinatorClient, job: JobName, as_json: AsJson = False) -> None:
    """Show one job with its validation, its mixture, the steps it skips and the samples masked.

    The mixture is known once the service has opened the job's index.

    Example: `dataservice job show vlm-sft`
    """
    shown, masked = client.job(job), client.quarantine(job)
    if as_json:
        print(show.job_json(shown, masked))
        return
    console.print(show.job_table(shown.with_validation))
    for each in shown.with_validation:
        if each.mixture is not None:
            _print_mixture(each.record.name, each.mixture)
    notes = (
        *show.failure_lines(shown),
        *show_records.note_lines(shown),
        *show_records.version_lines(shown),
        *show_records.skip_lines(shown),
    )
    for line in (*notes, *show.masked_samples(masked)):
        console.print(line)


@jobs.command()
@connected
def drain(client: CoordinatorClient, job: JobName, as_json: AsJson = False) -> None:
    """Refuse new attempts until the job is submitted again; let the running one finish.

    Example: `dataservice job drain vlm-sft`
    """
    _print_jobs([client.drain(job)], as_json)


@jobs.command()
@connected
def recost(
    client: CoordinatorClient,
    job: JobName,
    cost_file: Annotated[Path, typer.Argument(help="A file that `dataservice calibrate` wrote.")],
    from_step: Annotated[
        int | None,
        typer.Option(
            help="First step to plan with it; by default the first never planned.",
            min=0,
            callback=step_or_sample,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Plan with new costs from a step on. Steps that were planned before are replayed unchanged.

    Example: `dataservice job recost vlm-sft cost.yaml`
    """
    from dataservice.jobs.cost_file import read_cost_file

    cost = read_cost_file(cost_file).cost.model
    with asking("recosting"):
        begins, version = client.recost(job, json.dumps(cost.to_dict()), from_step)
    if as_json:
        print(json.dumps({"job": job, "from_step": begins, "cost_version": version}))
        return
    console.print(f"{job} plans with cost {version} from step {begins} on", highlight=False)


@jobs.command()
@connected
def mixture(
    client: CoordinatorClient,
    job: JobName,
    weight: Annotated[
        list[str] | None,
        typer.Option(help="SOURCE=WEIGHT, for each source whose weight changes."),
    ] = None,
    from_step: Annotated[
        int | None,
        typer.Option(
            help="First step drawn by them; by default the first never planned.",
            min=0,
            callback=step_or_sample,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show a job's mixture, or change its weights from a step on.

    Example: `dataservice job mixture vlm-sft --weight ocr=0.3 --from-step 2000`
    """
    begins = None
    if weight:
        begins = client.change_mixture(job, weights_of(weight), from_step)
    elif from_step is not None:
        raise SpecError("--from-step says when weights change; give --weight SOURCE=WEIGHT too.")
    shown = client.job(job).mixture
    if as_json:
        fields = None if shown is None else mixture_fields(shown)
        print(json.dumps({"job": job, "from_step": begins, "mixture": fields}))
        return
    if shown is not None:
        _print_mixture(job, shown)
    if begins is not None:
        console.print(
            f"{job} draws by these weights from step {begins} on, or the next window of steps",
            highlight=False,
        )


@jobs.command()
@connected
def delete(client: CoordinatorClient, job: JobName, as_json: AsJson = False) -> None:
    """Forget a job that no trainer uses, and its validation.

    Example: `dataservice job delete vlm-sft`
    """
    client.delete(job)
    if as_json:
        print(json.dumps({"deleted": job}))
        return
    console.print(f"deleted {job}", highlight=False)


def _print_mixture(job: str, mixture: MixtureTree) -> None:
    for each in mixture_shown(job, mixture):
        console.print(each)


def _print_jobs(statuses: list[JobStatus], as_json: bool) -> None:
    if as_json:
        print(show.jobs_json(statuses))
    else:
        console.print(show.job_table(statuses))


def _numbers(flag: str, text: str) -> list[int]:
    try:
        return [int(word) for word in text.replace(",", " ").split()]
    except ValueError as error:
        raise SpecError(f"{flag} is {text!r}; give whole numbers, as 512,1024,2048.") from error


def _read_job_file(path: Path) -> "JobFile":
    from dataservice.jobs.job_file import read_job

    return read_job(read_text(path, "job file"), path.parent.absolute())


def main() -> None:
    """Run the command. Deliberate errors are printed without a traceback and exit 1."""
    garbage.search_seldom()  # it took a fifth of the time in which a command's modules load
    try:
        app()
    except ServiceError as error:
        Terminal(stderr=True).print(
            f"[bold red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True
        )
        sys.exit(1)


if __name__ == "__main__":
    main()
