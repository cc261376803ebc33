"""Each module on GPUs of its own (MMScale): beside a layout, and for a model with a generator."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from dataservice.cli.terminal import Terminal
from dataservice.core.errors import PlanningError

if TYPE_CHECKING:  # they load the planner
    from dataservice.planning.compose import StepSamples
    from dataservice.planning.layout.cluster import NodeGroup
    from dataservice.planning.layout.model import ModelDescription
    from dataservice.planning.layout.module_layout import ModuleLayout
    from dataservice.planning.layout.search import Layout, LayoutTask


def beside_layout(task: "LayoutTask", layout: "Layout") -> dict[str, object]:
    """What modules on GPUs of their own reach for the same task; why not, where they have no
    room."""
    from dataservice.jobs.laid_out import own_gpus_fields
    from dataservice.planning.layout.module_layout import lay_out_modules

    try:
        found = lay_out_modules(task.model, task.group, task.batches, profile=task.profile)
        return own_gpus_fields(task, layout, found)
    except PlanningError as error:
        return {"refused": str(error)}


def mix_beside(
    task: "LayoutTask", layout: "Layout", tasks: "Sequence[LayoutTask]"
) -> dict[str, object]:
    """What encoders and decoder reach on the kinds of nodes that suit them best; why not, where
    they have no room."""
    from dataservice.jobs.laid_out import mixed_fields
    from dataservice.planning.layout.module_layout import lay_out_mix

    try:
        return mixed_fields(task, layout, lay_out_mix(tasks))
    except PlanningError as error:
        return {"refused": str(error)}


def mix_words(fields: object, one_kind: object) -> Iterator[Table | Text]:
    """The same, as people read it, beside what modules reach on the chosen kind alone."""
    assert isinstance(fields, Mapping)
    if "refused" in fields:
        yield Text(f"the mix used together: {fields['refused']}")
        return
    encoding, decoding = fields["encoder_nodes"], fields["decoder_nodes"]
    formula_s, chosen_s = fields["formula_s"], fields["chosen_formula_s"]
    if encoding == decoding:
        yield Text(
            "the mix used together: encoders and decoder are fastest on one kind of nodes, "
            f"{decoding}: {formula_s:.4g} s a step by MMScale's formula"
        )
        return
    told = (
        f"the mix used together: encoders on {encoding}, decoder on {decoding}, {formula_s:.4g} s "
        f"a step by MMScale's formula; the chosen layout, on one kind, {chosen_s:.4g} s "
        f"({chosen_s / formula_s - 1:+.1%})"
    )
    if isinstance(one_kind, Mapping) and "formula_s" in one_kind:
        alone_s = one_kind["formula_s"]
        told += f", and own GPUs of that kind {alone_s:.4g} s ({alone_s / formula_s - 1:+.1%})"
    yield _table(fields, title="each module on its own kind of nodes")
    yield Text(f"{told}. It is a figure to buy and place by: the runtime trains on one kind")


def modules_beside(fields: object, chosen_s: float) -> Iterator[Table | Text]:
    """The same, as people read it."""
    assert isinstance(fields, Mapping)
    if "refused" in fields:
        yield Text(f"each module on GPUs of its own: {fields['refused']}")
        return
    yield _table(fields)
    formula_s, ours_s, step_s = (fields[key] for key in ("formula_s", "chosen_formula_s", "step_s"))
    told = (
        f"each module on GPUs of its own, by MMScale's formula: {formula_s:.4g} s a step, the "
        f"chosen layout {ours_s:.4g} s ({ours_s / formula_s - 1:+.1%}); by the step planner "
    )
    if step_s is None:
        told += "it has no room for these samples"
    else:
        told += f"{step_s:.4g} s, the chosen layout {chosen_s:.4g} s ({chosen_s / step_s - 1:+.1%})"
    yield Text(f"{told}. A job cannot name it: its ranks are replicas of one shape")


def lay_out_by_modules(
    model: "ModelDescription",
    groups: "Sequence[NodeGroup]",
    batches: "Sequence[StepSamples]",
    generator_tokens: int | None,
    out: Path,
    *,
    as_json: bool,
) -> None:
    """GPUs for every module of a model with a generator, on the kind of nodes where a step takes
    least; printed and written. Raises PlanningError where none fits."""
    from dataservice.jobs.laid_out import module_layout_fields, write_layout
    from dataservice.planning.layout.module_layout import lay_out_modules

    found: list[tuple[ModuleLayout, NodeGroup]] = []
    refused: list[PlanningError] = []
    for group in groups:
        try:
            made = lay_out_modules(model, group, batches, generator_tokens=generator_tokens)
            found.append((made, group))
        except PlanningError as error:
            refused.append(error)
    if not found:
        raise refused[0]
    made, group = min(found, key=lambda each: each[0].allocation.seconds)
    fields = module_layout_fields(model, group, made)
    write_layout(out, fields)
    if as_json:
        print(json.dumps(fields, indent=2))
        return
    console, allocation = Terminal(), made.allocation
    console.print(
        Text(
            f"{model.name} on {group.gpus} GPUs: {allocation.seconds:.4g} s a step of {made.batch} "
            f"samples by MMScale's formula, at most {allocation.gap:.1%} over its bound; "
            f"recomputation: {made.recompute}"
        )
    )
    console.print(_table(fields["own_gpus"]))
    console.print(f"wrote {out}, for the trainer; a job cannot name it", highlight=False)


def _table(fields: Any, title: str = "each module on GPUs of its own") -> Table:
    table = Table(title=title)
    for name in ("module", "GPUs", "TP", "DP", "PP", "slowest stage, s"):
        table.add_column(name, justify="left" if name == "module" else "right")
    for module in fields["modules"]:
        keys = ("gpus", "tensor_parallel", "data_parallel", "pipeline_parallel")
        sizes = [f"{module[key]:,}" for key in keys]
        table.add_row(module["name"], *sizes, f"{module['stage_s']:.4g}")
    return table
