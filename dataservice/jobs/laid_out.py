"""The layout file: what `dataservice layout` found, and the keys of a job that is trained by it.

dataservice layout ──► layout.yaml ──► job: {topology, plan}   to be put into the job file
                   │               └── stages, bubbles         to build the trainer by
                   └─► layout.actions  encoders in bubbles     a line an action, for the trainer
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import yaml

from dataservice.core.errors import SpecError
from dataservice.jobs.layout_keys import LAYOUT_FORMAT
from dataservice.planning.layout.actions import format_actions
from dataservice.planning.layout.cluster import NodeGroup
from dataservice.planning.layout.model import ModelDescription
from dataservice.planning.layout.module_layout import (
    MixedLayout,
    ModuleLayout,
    formula_s,
    planned_s,
)
from dataservice.planning.layout.profile import RECOMPUTE
from dataservice.planning.layout.search import Candidate, Layout, LayoutTask
from dataservice.planning.layout.search_groups import GroupLayout

ACTIONS_SUFFIX = ".actions"


def layout_fields(task: LayoutTask, layout: Layout) -> dict[str, object]:
    """The layout as plain data, in the order of its file."""
    best = layout.best
    return {
        "format": LAYOUT_FORMAT,
        "model": task.model.name,
        "gpus": task.group.gpus,
        "nodes": task.group.nodes,
        "device": task.group.device.name,
        "step_s": best.step_s,
        "lower_bound_s": layout.lower_bound_s,
        "choices": [
            {
                "name": choice.name,
                "chosen": choice.chosen,
                "runner_up": choice.runner_up,
                # What does not fit has no seconds.
                "runner_up_s": choice.runner_up_s if np.isfinite(choice.runner_up_s) else None,
            }
            for choice in layout.choices
        ],
        "job": _job_keys(task, best),
        "stages": _stages(best),
        **_bubbles(best),
    }


def other_nodes(others: Sequence[GroupLayout]) -> list[dict[str, object]]:
    """What the other kinds of nodes of a mix reach, each by itself; no seconds where none fits."""
    return [
        {
            "nodes": each.task.group.nodes,
            "device": each.task.group.device.name,
            "step_s": None if each.layout is None else each.step_s,
            **({"refused": each.refused} if each.refused else {}),
        }
        for each in others
    ]


def module_fields(found: ModuleLayout) -> dict[str, object]:
    """Each module on GPUs of its own: their sizes, and the seconds of MMScale's formula."""
    allocation = found.allocation
    return {
        "recompute": found.recompute,
        "batch": found.batch,
        "formula_s": allocation.seconds,
        "formula_bound_s": allocation.lower_bound_s,
        "modules": [
            {
                "name": module.name,
                "gpus": module.gpus,
                "tensor_parallel": module.tensor_ranks,
                "data_parallel": module.data_ranks,
                "pipeline_parallel": module.pipeline_stages,
                "stage_s": module.stage_s,
                "held_bytes": module.held_bytes,
            }
            for module in allocation.modules
        ],
    }


def mixed_fields(task: LayoutTask, layout: Layout, found: MixedLayout) -> dict[str, object]:
    """Each module on the kind of nodes that suits it, beside the chosen layout by the formula."""
    return {
        **module_fields(found.modules),
        "encoder_nodes": found.encoder_group.words,
        "decoder_nodes": found.decoder_group.words,
        "chosen_formula_s": formula_s(task, layout.best.replica, found.modules.batch),
    }


def own_gpus_fields(task: LayoutTask, layout: Layout, found: ModuleLayout) -> dict[str, object]:
    """The same beside the chosen layout: that one by the formula, and these modules by the step
    planner, no seconds where no microbatch has room."""
    step_s = planned_s(task, found)
    return {
        **module_fields(found),
        "chosen_formula_s": formula_s(task, layout.best.replica, found.batch),
        "step_s": step_s if np.isfinite(step_s) else None,
    }


def module_layout_fields(
    model: ModelDescription, group: NodeGroup, found: ModuleLayout
) -> dict[str, object]:
    """The file of a model that is laid out by modules alone."""
    return {
        "format": LAYOUT_FORMAT,
        "model": model.name,
        "gpus": group.gpus,
        "nodes": group.nodes,
        "device": group.device.name,
        "own_gpus": module_fields(found),
    }


def _job_keys(task: LayoutTask, best: Candidate) -> dict[str, object]:
    """What a job file takes as it stands."""
    topology = best.replica.topology(task.group)
    return {
        "topology": {
            "tensor_parallel": best.replica.parallel.tensor_ranks,
            "pipeline_parallel": topology.pipeline_stages,
            "virtual_stages": topology.virtual_stages,
            "replicas_per_node": topology.replicas_per_node,
            "replicas_meet": topology.replicas_meet,
            "encoder_stage": topology.encoder_stage,
            "encoders_train": topology.encoders_train,
            **{
                name: list(shares)
                for name in ("stage_shares", "vision_shares", "audio_shares")
                if (shares := getattr(topology, name))
            },
        },
        "plan": {
            "memory_tokens": best.replica.held_tokens(task.group, best.microbatch_tokens),
            "cost": best.replica.cost(task.group).to_dict(),
        },
    }


def _stages(best: Candidate) -> list[dict[str, object]]:
    """Every model chunk in model order: its stage, its layers, and which of them recompute."""
    replica = best.replica
    names, choice = replica.profile.names, replica.recompute.choice
    return [
        {
            "stage": chunk % replica.parallel.pipeline_stages,
            "layers": list(names[first:end]),
            **{
                kind: [names[at] for at in range(first, end) if choice[at] == number]
                for number, kind in enumerate(RECOMPUTE)
                if kind != "none"
            },
        }
        for chunk, (first, end) in enumerate(
            zip(replica.bounds[:-1].tolist(), replica.bounds[1:].tolist(), strict=True)
        )
    ]


def _bubbles(best: Candidate) -> dict[str, object]:
    """Encoders in the bubbles of the backbone: how they lie, and what their schedule takes."""
    found = best.replica.in_bubbles
    if found is None:
        return {}
    made, plan = found.schedule, found.schedule.plan
    return {
        "bubbles": {
            "microbatches": found.microbatches,
            "encoder_plan": {
                "pipeline_parallel": plan.pipeline_parallel,
                "tensor_parallel": plan.tensor_parallel,
                "blocks": plan.blocks,
                "slices": plan.slices,
            },
            "pipeline_of": made.pipeline_of.tolist(),
            "recompute": found.recompute,
            "layers": {name: list(layers) for name, layers in found.layers.items()},
            "step_s": made.step_s,
            "lower_bound_s": made.lower_bound_s,
            "coarse_step_s": made.coarse_step_s,
            "backbone_s": made.backbone_s,
            "efficiency": made.efficiency,
        }
    }


def write_actions(path: Path, layout: Layout) -> Path | None:
    """Write the action list of encoders in bubbles beside the layout file `path`: its own path,
    None where encoders run elsewhere. Raises SpecError."""
    found = layout.best.replica.in_bubbles
    if found is None:
        return None
    beside = path.with_suffix(ACTIONS_SUFFIX)
    _write(beside, format_actions(found.schedule.actions))
    return beside


def write_layout(path: Path, fields: dict[str, object]) -> None:
    """Write it as YAML. Raises SpecError."""
    head = (
        "# Written by `dataservice layout`. A job file that names it as `layout: FILE` has what\n"
        "# is under `job`. `stages`, and what recomputes in them, are for the trainer.\n"
    )
    _write(path, head + yaml.safe_dump(fields, sort_keys=False))


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise SpecError(
            f"the file {path} cannot be written: {error.strerror}. Give another with --out."
        ) from error
