"""`dataservice layout`: a model over the GPUs, for the samples of an index."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from dataservice.cli.layout_modules import (
    beside_layout,
    lay_out_by_modules,
    mix_beside,
    mix_words,
    modules_beside,
)
from dataservice.cli.listing import Listing
from dataservice.cli.progress import measuring_progress
from dataservice.cli.terminal import Terminal
from dataservice.core.errors import PlanningError, SpecError

if TYPE_CHECKING:  # they load the planner
    from dataservice.operate.config import ServiceConfig
    from dataservice.planning.compose import StepSamples
    from dataservice.planning.layout.cluster import NodeGroup
    from dataservice.planning.layout.model import ModelDescription
    from dataservice.planning.layout.profile import LayerProfile
    from dataservice.planning.layout.replica import InBubbles, Place
    from dataservice.planning.layout.search import Layout, LayoutTask
    from dataservice.planning.layout.search_groups import GroupLayout


def _list_models(wanted: bool) -> None:
    """Print the models that ship, and end."""
    if not wanted:
        return
    Terminal().print(_models())
    raise typer.Exit


def lay_out(
    model: Annotated[
        str, typer.Argument(help="A model file, a config.json, or the name of one that ships.")
    ],
    cluster: Annotated[Path, typer.Argument(help="The cluster file (YAML).")],
    job_file: Annotated[
        Path | None,
        typer.Option("--job", help="Job file whose index, mixture and batch are trained."),
    ] = None,
    index: Annotated[
        str | None,
        typer.Option(help="Or: the folder of an index, of which --batch samples make a step."),
    ] = None,
    batch: Annotated[
        int | None, typer.Option(help="Samples of a step drawn from --index.", min=1)
    ] = None,
    layers: Annotated[
        Path | None,
        typer.Option(help="Layers that `dataservice calibrate --layers` measured."),
    ] = None,
    out: Annotated[Path, typer.Option(help="The layout file to write.")] = Path("layout.yaml"),
    draw: Annotated[
        list[Path] | None,
        typer.Option(help="Draw a step before and after: a .svg or .png file; may be repeated."),
    ] = None,
    steps: Annotated[int, typer.Option(help="Steps drawn to judge by.", min=1, max=64)] = 4,
    config: Annotated[
        Path | None, typer.Option("--config", help="The service's config (YAML).")
    ] = None,
    encoders: Annotated[
        list[str] | None,
        typer.Option(help="Where encoders may run: first, own, cut, spread or bubbles; may be "
                          "repeated. All of them if left out."),
    ] = None,
    overlap_gradients: Annotated[
        bool,
        typer.Option("--overlap-gradients",
                     help="The trainer sums gradients under its last backward pass, and gathers "
                          "weights under its first forward pass."),
    ] = False,
    generator_tokens: Annotated[
        int | None,
        typer.Option(help="Tokens of a sample that the model's generator makes; an index has no "
                          "lengths for them.", min=1),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print what is written as JSON instead of tables.")
    ] = False,
    list_models: Annotated[
        bool,
        typer.Option("--list", help="Print the models that ship, and end.", is_eager=True,
                     callback=_list_models),
    ] = False,
) -> None:  # fmt: skip
    """Lay a model over the GPUs: parallelism, stages, recomputation and where encoders run.

    Every way is priced by the step planner, on steps drawn from the index of a job, or from an
    index alone. Prints what was chosen beside what came second, and writes a file that a job names
    as `layout: layout.yaml`. Of several kinds of nodes, each is searched by itself. A model with a
    generator is laid out by its modules, each on GPUs of its own.

    Example: `dataservice layout qwen2.5-vl-7b cluster.yaml --job job.yaml --draw pipeline.svg`
    """
    from dataservice.jobs.laid_out import (
        ACTIONS_SUFFIX,
        layout_fields,
        other_nodes,
        write_actions,
        write_layout,
    )
    from dataservice.jobs.layout_files import read_cluster, read_model
    from dataservice.jobs.pipeline_drawing import require_drawable
    from dataservice.operate.config import read_config
    from dataservice.planning.layout.search import LayoutTask

    pictures = draw or []
    require_drawable(pictures)
    if not out.parent.is_dir():  # said before a search takes minutes
        raise SpecError(f"the layout file {out} has no folder {out.parent}: make it first.")
    if out.suffix == ACTIONS_SUFFIX:
        raise SpecError(
            f"--out is {out}, a name that its list of actions has beside it: let it end in .yaml."
        )
    places = _places(encoders)
    for path, option in ((out, "--out"), *((picture, "--draw") for picture in pictures)):
        _require_writable(path, option)
    described, groups = read_model(model), read_cluster(cluster).groups
    if layers is not None and len(groups) > 1:
        raise SpecError(
            f"--layers was measured on one kind of nodes, and {cluster} has {len(groups)}: give a "
            "cluster of that kind alone, or leave --layers out."
        )
    measured = None if layers is None else _measured(layers, described)
    settings = read_config(config, {})
    if job_file is not None:
        _require_no_index(index, batch)
        batches = tuple(_of_job(job_file, settings, steps))
    else:
        batches = _of_index(index, batch, settings, steps)
    if described.generator or generator_tokens:
        if described.generator:
            _require_none(
                described.name,
                {
                    "--draw": pictures,
                    "--layers": layers,
                    "--encoders": encoders,
                    "--overlap-gradients": overlap_gradients,
                },
            )
        lay_out_by_modules(described, groups, batches, generator_tokens, out, as_json=as_json)
        return
    task = LayoutTask(
        model=described,
        group=groups[0],
        batches=batches,
        measured=measured,
        places=places,
        overlap_gradients=overlap_gradients,
    )
    best, *others = _searched(task, groups)
    task, layout = best.task, best.layout
    assert layout is not None  # where none fits, the search raises
    fields = layout_fields(task, layout)
    if others:
        fields["other_nodes"] = other_nodes(others)
    if described.encoders:
        fields["own_gpus"] = beside_layout(task, layout)
        if others:
            tasks = [best.task, *(each.task for each in others)]
            fields["mixed_nodes"] = mix_beside(task, layout, tasks)
    actions = write_actions(out, layout)
    if actions is not None:
        fields["actions"] = actions.name
    write_layout(out, fields)
    if pictures:
        _draw(pictures, task, layout)
    if as_json:
        print(json.dumps(fields, indent=2))
        return
    console = Terminal()
    ranks = layout.best.replica.parallel.tensor_ranks
    parts = [*layout_tables(task, layout)]
    if described.encoders:
        parts += modules_beside(fields["own_gpus"], layout.best.step_s)
        if others:
            parts += mix_words(fields["mixed_nodes"], fields["own_gpus"])
    for part in (*parts, *_notes(best, others, layers, ranks)):
        console.print(part)
    for picture in pictures:
        console.print(f"drew {picture}", highlight=False)
    if actions is not None:
        console.print(f"wrote {actions}, what each device runs when", highlight=False)
    console.print(f"wrote {out}; a job names it as `layout: {out}`", highlight=False)


def _places(given: list[str] | None) -> "tuple[Place, ...]":
    """Where encoders may run. Raises SpecError."""
    from dataservice.planning.layout.replica import PLACES

    if given and (strange := [place for place in given if place not in PLACES]):
        raise SpecError(
            f"--encoders is {strange[0]!r}; encoders run in one of {', '.join(PLACES)}: give one "
            "of these, or leave it out."
        )
    return tuple(place for place in PLACES if not given or place in given)


def _require_writable(path: Path, option: str) -> None:
    """Said before a search takes minutes. Leaves nothing behind. Raises SpecError."""
    there = path.exists()
    try:
        with path.open("ab"):
            pass
    except OSError as error:
        raise SpecError(
            f"the file {path} cannot be written: {error.strerror}. Give another with {option}."
        ) from error
    if not there:
        path.unlink()


def _require_none(model: str, given: Mapping[str, object]) -> None:
    """None of the options that are for replicas of one shape. Raises SpecError."""
    if found := [option for option, value in given.items() if value]:
        raise SpecError(
            f"{model} has a generator, and is laid out by its modules alone, with computed layers, "
            f"whole gradients and nothing to draw: leave {', '.join(found)} out."
        )


def _require_no_index(index: str | None, batch: int | None) -> None:
    """Beside --job, neither option that stands for it. Raises SpecError."""
    if index is not None:
        raise SpecError("give either --job or --index, not both: a job names its own index.")
    if batch is not None:
        raise SpecError(
            f"--batch is {batch}, and the job file of --job says its batch: leave --batch out, or "
            "give --index instead of --job."
        )


def _of_index(
    index: str | None, batch: int | None, settings: "ServiceConfig", steps: int
) -> "tuple[StepSamples, ...]":
    """The first steps of a bare index."""
    from dataservice.jobs.index_batches import index_batches

    if index is None:
        raise SpecError(
            "a layout is made for real samples: give --job JOB.yaml, or --index FOLDER with "
            "--batch SAMPLES, exactly one of --job and --index."
        )
    if batch is None:
        raise SpecError(
            f"the index {index} says nothing of how many samples make a step: give --batch SAMPLES "
            "with --index, or --job instead of it."
        )
    return index_batches(index, samples=batch, steps=steps, limits=settings.limits)


def _of_job(job_file: Path, settings: "ServiceConfig", steps: int) -> "Iterator[StepSamples]":
    """The first steps of a job, from its index."""
    from dataservice.core.cursor import Cursor
    from dataservice.engine.planner import draw_step
    from dataservice.jobs.setup import job_records, open_job
    from dataservice.jobs.yaml_file import read_text

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


def _searched(task: "LayoutTask", groups: "Sequence[NodeGroup]") -> "tuple[GroupLayout, ...]":
    """Every kind of nodes by itself, the fastest first, with progress."""
    from dataservice.planning.layout.search_groups import search_groups

    with measuring_progress(Terminal(stderr=True), "laying out") as tell:

        def told(number: int, done: int, total: int, best_s: float) -> None:
            nodes = f"nodes {number + 1} of {len(groups)}, " if len(groups) > 1 else ""
            tell(done, total, f"{nodes}{'their ' if nodes else ''}best {best_s:.4g} s")

        return search_groups(task, groups, progress=told)


def _measured(layers: Path, model: "ModelDescription") -> "LayerProfile":
    """The layers of a file, which are those of the model. Raises SpecError."""
    from dataservice.jobs.layer_file import read_layer_file
    from dataservice.planning.layout.measured_profile import require_measured

    measured = read_layer_file(layers)
    try:
        require_measured(measured, model)
    except PlanningError as error:
        raise SpecError(f"the layer file {layers} is not of {model.name}: {error}") from error
    return measured


def _draw(pictures: Sequence[Path], task: "LayoutTask", layout: "Layout") -> None:
    """The first of the steps, before and after."""
    from dataservice.jobs.pipeline_drawing import draw_before_after
    from dataservice.planning.layout.before_after import time_before_after

    words = f"the first step, {len(task.batches[0].lengths):,} samples"
    draw_before_after(pictures, task, time_before_after(task, layout), step_words=words)


def _notes(
    best: "GroupLayout", others: "Sequence[GroupLayout]", layers: Path | None, ranks: int
) -> Iterator[Text]:
    """What a reader has to know besides: other nodes, and what was measured."""
    if others:
        yield Text(f"for {best.task.group.words} alone: a job trains on one kind of nodes")
    for each in others:
        reached = each.refused or f"{each.step_s:.4g} s a step"
        yield Text(f"  {each.task.group.words} alone: {reached}")
    if layers is not None:
        told = f"layers as {layers} has them, measured without tensor parallelism"
        if ranks > 1:
            told += (
                f"; over {ranks} ranks they shrink as computed ones do, and exchange as computed"
            )
        yield Text(told)


def _models() -> Listing:
    """Models that ship: name, weights, and where the shape comes from."""
    from dataservice.jobs.layout_files import read_model, shipped

    table = Listing(("model", "weights", "from"), words=("model", "from"))
    for name in shipped():
        described = read_model(name)
        table.add_row(name, f"{described.parameters / 1e9:.1f} billion", described.source)
    return table


def layout_tables(task: "LayoutTask", found: "Layout") -> Iterator[Table | Text]:
    """What was chosen, what came second, and the stages."""
    best = found.best
    yield Text(
        f"{task.model.name} on {task.group.gpus} GPUs: {best.step_s:.4g} s a step, at most "
        f"{found.gap:.1%} over the bound ({1 + len(found.others)} layouts priced, "
        f"{len(found.refused)} cannot be)"
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
    if replica.in_bubbles is not None:
        yield _bubbles_words(replica.in_bubbles)


def _bubbles_words(found: "InBubbles") -> Text:
    """How encoders lie over the backbone, and what their schedule takes."""
    made, plan = found.schedule, found.schedule.plan
    return Text(
        f"encoders in bubbles: {plan.pipelines} pipelines of PP {plan.pipeline_parallel} and TP "
        f"{plan.tensor_parallel} over each replica; {found.microbatches} equal microbatches take "
        f"{made.step_s:.4g} s, the same backbone alone {made.backbone_s:.4g} s, bound "
        f"{made.lower_bound_s:.4g} s; {made.efficiency:.1%} of encoding in bubbles"
    )
