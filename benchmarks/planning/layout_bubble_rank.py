"""One rank of `layout_bubble_run`: it times layers, plans their bubbles, and trains in turns."""

import argparse
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from benchmarks.planning.layout_bubble_run import MICROBATCHES, STAGES, TURNS
from dataservice.planning import (
    BackboneTimes,
    EncoderTimes,
    KernelTimes,
    format_actions,
    schedule_bubbles,
)
from demo.chunks import DemoEncoders, cut_model, sum_tied_gradient
from demo.model import MERGE, PATCH, DemoModel, ModelConfig
from trainer_client.runtime import (
    BubbleSchedule,
    EncoderAction,
    HiddenStates,
    PipelineMesh,
    PipelineResult,
    Timeline,
    gantt,
    one_forward_one_backward,
    read_bubbles,
    run_pipeline_step,
    simulate,
    spread_encoders,
)
from trainer_client.runtime.bubble_schedule import ENCODE, RETURN
from trainer_client.shard import (
    FeatureExchange,
    Group,
    Microbatch,
    ModalityBatch,
    PlanSummary,
    Shard,
    Wave,
)

LAYERS, VISION_LAYERS = 4, 6
WARM_UP = 6
PICTURE_ROWS = 8  # feature rows along a side, of 2 × 2 patches each
TEXT_TOKENS = 40
TIMEOUT_S = 300.0
CONFIG = ModelConfig(
    width=192, layers=LAYERS, heads=4, kv_heads=2, vocabulary=512,
    encoder_width=64, vision_layers=VISION_LAYERS,
)  # fmt: skip


def rank_main(answer: Path, turns: int) -> None:
    """Time, plan, and train in turns; the first rank writes what was found."""
    rank = int(os.environ["RANK"])
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))
    torch.manual_seed(0)
    model, step = DemoModel(CONFIG), shard()
    with PipelineMesh(stages=STAGES, encoder_stage="spread", timeout_s=TIMEOUT_S) as mesh:
        train = partial(one_step, model, step, mesh)
        backbone = one_forward_one_backward(STAGES, 1, MICROBATCHES)
        around = spread_encoders(backbone, [VISION_LAYERS], trains=[True])
        quickest = Quickest.of([train(around).timeline for _ in range(WARM_UP)])
        told = [quickest.planned() if rank == 0 else ""]
        dist.broadcast_object_list(told, src=0)
        bubbles, _ = read_bubbles(told[0], stages=STAGES)
        ways: dict[str, Callable[[], PipelineResult]] = {
            "first": partial(train, None),
            "around": partial(train, around),
            "bubbles": partial(train, bubbles),
        }
        found = in_turns(ways, mesh, turns)
        if rank == 0:
            seconds = {way: [seconds for seconds, _ in each] for way, each in found.items()}
            lived = {way: min(each, key=lambda one: one[0])[1] for way, each in found.items()}
            ideal = {"around": quickest.simulated(around), "bubbles": quickest.simulated(bubbles)}
            print(bubbles, gantt({**lived, "simulated": ideal["bubbles"]}), sep="\n", flush=True)
            said = {"seconds": seconds, "simulated": {w: t.makespan_s for w, t in ideal.items()}}
            answer.write_text(json.dumps(said))
    dist.destroy_process_group()


def in_turns(
    ways: Mapping[str, Callable[[], PipelineResult]], mesh: PipelineMesh, turns: int
) -> dict[str, list[tuple[float, Timeline]]]:
    """Seconds and timeline of every way in every turn."""
    found: dict[str, list[tuple[float, Timeline]]] = {way: [] for way in ways}
    order = list(ways)
    for _ in range(turns):
        for way in order:
            result = ways[way]()
            found[way].append((result.seconds, result.timeline))
        order = [*order[1:], order[0]]
    return found


def one_step(
    model: DemoModel, step: Shard, mesh: PipelineMesh, schedule: BubbleSchedule | None
) -> PipelineResult:
    model.zero_grad()
    chunks = cut_model(model, STAGES)[mesh.stage :: STAGES]
    result = run_pipeline_step(
        chunks,
        step,
        mesh,
        HiddenStates(width=CONFIG.width, dtype=torch.float32),
        schedule=schedule,
        encoders=None if schedule is None else DemoEncoders(model, modalities=("vision",)),
    )
    sum_tied_gradient(chunks, mesh)
    return result


def shard() -> Shard:
    """Equal microbatches: a picture, then text."""
    return Shard(
        job="bubbles", attempt=1, step=0, rank=0, replica=0, cursor_after="", size_bytes=0,
        plan=PlanSummary(
            digest="bubbles", replicas=1, samples=MICROBATCHES, loss_tokens=0, predicted_s=0.0,
            waves=tuple(_wave(number) for number in range(MICROBATCHES)), stages=(),
        ),
        microbatches=tuple(_microbatch(number) for number in range(MICROBATCHES)),
    )  # fmt: skip


def _wave(number: int) -> Wave:
    group = Group(pack=number, replicas=(0,), tokens=0, predicted_s=0.0)
    return Wave(index=number, groups=(group,), idle=())


def _microbatch(number: int) -> Microbatch:
    made = torch.Generator().manual_seed(number)
    rows, side = PICTURE_ROWS**2, PICTURE_ROWS * MERGE * PATCH
    ids = torch.randint(0, CONFIG.vocabulary, (rows + TEXT_TOKENS,), generator=made)
    labels = torch.where(torch.arange(len(ids)) < rows, -100, ids.roll(-1))
    pixels = torch.randint(0, 256, (1, side, side, 3), generator=made, dtype=torch.uint8)
    exchange = FeatureExchange(
        send_rows=torch.arange(rows), send_splits=[rows], recv_splits=[rows],
        recv_positions=torch.arange(rows),
    )  # fmt: skip
    return Microbatch(
        wave=number, pack=number, cp_group=(0,), cp_rank=0, predicted_s=0.0,
        input_ids=ids, labels=labels, position_ids=torch.arange(len(ids)),
        cu_seqlens=torch.tensor([0, len(ids)], dtype=torch.int32),
        lengths=torch.tensor([len(ids)], dtype=torch.int32),
        sample_ids=torch.tensor([number]),
        vision=ModalityBatch(items=[pixels], exchange=exchange),
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Quickest:
    """Least seconds of a microbatch: `chunks` float64[stage, 2] forward and backward, `encoder`
    the same of the whole encoder."""

    chunks: NDArray[np.float64]
    encoder: NDArray[np.float64]

    @staticmethod
    def of(timelines: Sequence[Timeline]) -> "Quickest":
        """Of some steps."""
        lasted = np.array([each.end_s - each.start_s for each in timelines])
        spans = [span for each in timelines for span in each.encoders]
        encoder = [
            min(span.end_s - span.start_s for span in spans if span.action.kind == kind)
            for kind in (ENCODE, RETURN)
        ]
        return Quickest(chunks=lasted.min(axis=(0, 1)), encoder=np.array(encoder))

    def planned(self) -> str:
        """The list that the planner writes for these seconds."""

        def evenly(layers: int, seconds: float) -> KernelTimes:
            return KernelTimes(
                seconds=np.full((layers, 1), seconds / layers), communicates=np.array([False])
            )

        forward, backward = self.chunks.sum(axis=0)
        schedule = schedule_bubbles(
            BackboneTimes(
                forward=evenly(LAYERS, forward),
                backward=evenly(LAYERS, backward),
                microbatches=MICROBATCHES,
                pipeline_parallel=STAGES,
            ),
            [
                EncoderTimes(
                    name="vision",
                    forward={1: evenly(VISION_LAYERS, self.encoder[0])},
                    backward={1: evenly(VISION_LAYERS, self.encoder[1])},
                )
            ],
        )
        return format_actions(schedule.actions)

    def simulated(self, schedule: BubbleSchedule) -> Timeline:
        """A schedule in these seconds."""
        chunks = np.tile(self.chunks, (MICROBATCHES, 1, 1))
        encoding = {
            (stage, action): self.encoder[int(action.kind == RETURN)]
            * (action.end - action.first)
            / VISION_LAYERS
            for stage, action in schedule.walk()
            if isinstance(action, EncoderAction)
        }
        return simulate(schedule, chunks[..., 0], chunks[..., 1], encoding)


def main() -> None:
    """A rank of a run that `layout_bubble_run` started."""
    made = argparse.ArgumentParser(prog="python -m benchmarks.planning.layout_bubble_run")
    made.add_argument("--answer", type=Path, required=True)
    made.add_argument("--turns", type=int, default=TURNS)
    options = made.parse_args()
    rank_main(options.answer, options.turns)


if __name__ == "__main__":
    main()
