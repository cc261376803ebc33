"""`dataservice layout`: a model over the GPUs, for the samples of a job's index."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from dataservice.cli.progress import measuring_progress
from dataservice.cli.terminal import Terminal
from dataservice.core.errors import SpecError

if TYPE_CHECKING:  # they load the planner
    from dataservice.planning.compose import StepSamples
    from dataservice.planning.layout.search import Layout, LayoutTask


def lay_out(
    model: Annotated[
        str, typer.Argument(help="A model file, a config.json, or the name of one that ships.")
    ],
    cluster: Annotated[Path, typer.Argument(help="The cluster file (YAML).")],
    job_file: Annotated[
        Path, typer.Option("--job", help="Job file whose index, mixture and batch are trained.")
    ],
    out: Annotated[Path, typer.Option(help="The layout file to write.")] = Path("layout.yaml"),
    steps: Annotated[int, typer.Option(help="Steps drawn to judge by.", min=1, max=64)] = 4,
    config: Annotated[
        Path | None, typer.Option("--config", help="The service's config (YAML).")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print what is written as JSON instead of tables.")
    ] = False,
) -> None:
    """Lay a model over the GPUs: parallelism, stages, recomputation and where encoders run.

    Every way is priced by the step planner, on steps drawn from the job's index. Prints what was
    chosen beside what came second, and writes a file that a job names as `layout: layout.yaml`.

    Example: `dataservice layout qwen2.5-vl-7b cluster.yaml --job job.yaml`
    """
    from dataservice.jobs.laid_out import layout_fields, write_layout
    from dataservice.jobs.layout_files import read_cluster, read_model
    from dataservice.planning.layout.search import LayoutTask, search_layout

    described, groups = read_model(model), read_cluster(cluster).groups
    if len(groups) > 1:
        raise SpecError(
            f"the cluster file {cluster} has {len(groups)} kinds of nodes; a layout is made for "
            "one: give each kind a file of its own"
        )
    task = LayoutTask(
        model=described, group=groups[0], batches=tuple(_drawn(job_file, config, steps))
    )
    with measuring_progress(Terminal(stderr=True)) as tell:
        found = search_layout(
            task, progress=lambda done, total, best_s: tell(done, total, f"best {best_s:.4g} s")
        )
    fields = layout_fields(task, found)
    write_layout(out, fields)
    if as_json:
        print(json.dumps(fields, indent=2))
        return
    console = Terminal()
    for part in layout_tables(task, found):
        console.print(part)
    console.print(f"wrote {out}; a job names it as `layout: {out}`", highlight=False)


def _drawn(job_file: Path, config: Path | None, steps: int) -> "Iterator[StepSamples]":
    """The first steps of a job, from its index."""
    from dataservice.core.cursor import Cursor
    from dataservice.engine.planner import draw_step
    from dataservice.jobs.setup import job_records, open_job
    from dataservice.jobs.yaml_file import read_text
    from dataservice.operate.config import read_config

    settings = read_config(config, {})
    text = read_text(job_file, "job file")
    record = job_records(text, str(job_file.parent), storage_profiles=settings.storage_profiles)[0]
    setup = open_job(
        record,
        custom_processors=settings.custom_processors,
        limits=settings.limits,
        storage_profiles=settings.storage_profiles,
    )
    cursor = Cursor(order=setup.order)
    for _ in range(steps):
        drawn = draw_step(setup, cursor)
        if drawn is None:
            return  # the data ends
        samples, cursor = drawn
        yield samples


def layout_tables(task: "LayoutTask", found: "Layout") -> Iterator[Table | Text]:
    """What was chosen, what came second, and the stages."""
    best = found.best
    yield Text(
        f"{task.model.name} on {task.group.gpus} GPUs: {best.step_s:.4g} s a step, at most "
        f"{found.gap:.1%} over the bound ({1 + len(found.others)} layouts fit, "
        f"{len(found.refused)} do not)"
    )
    choices = Table(title="choices")
    for name in ("choice", "chosen", "next best", "s", "slower by"):
        choices.add_column(name, justify="right" if name in ("s", "slower by") else "left")
    for choice in found.choices:
        fits = choice.runner_up_s < float("inf")
        choices.add_row(
            choice.name,
            str(choice.chosen),
            str(choice.runner_up),
            f"{choice.runner_up_s:.4g}" if fits else "does not fit",
            f"{choice.gain:.1%}" if fits else "",
        )
    yield choices
    stages = Table(title="model chunks")
    for name in ("stage", "from", "to", "layers", "decoder's part"):
        stages.add_column(name, justify="left" if name in ("from", "to") else "right")
    replica = best.replica
    bounds, names = replica.bounds.tolist(), replica.profile.names
    for chunk, share in enumerate(replica.chunk_shares):
        first, end = bounds[chunk], bounds[chunk + 1]
        stage = chunk % replica.parallel.pipeline_stages
        stages.add_row(str(stage), names[first], names[end - 1], str(end - first), f"{share:.1%}")
    yield stages
