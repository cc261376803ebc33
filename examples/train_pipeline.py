"""Train a pipeline as a layout file says, fed by a running service, and draw where a step went.

    torchrun --nproc-per-node 4 -m examples.train_pipeline \
        --service 127.0.0.1:50051 --job demo --layout layout.yaml

`dataservice layout` writes the file; the job has it as `layout: layout.yaml`, so that its steps are
planned for these stages. Of the last step, each stage's actions are drawn three times: as measured,
as they would have run in the measured seconds without any message, and as the layout predicts.
Gradients are not clipped, for which the stages would have to add up their norms, and nothing is
saved.
"""

import argparse

import torch
import torch.distributed as dist

from demo.chunks import DemoEncoders, lay_out_model, sum_tied_gradient
from demo.model import DemoModel
from examples.train_ddp import PEER_TIMEOUT_S, arguments, process_group
from trainer_client import Shard, ShardDataset
from trainer_client.runtime import (
    HiddenStates,
    PipelineMesh,
    PipelineResult,
    StageLayout,
    gantt,
    run_pipeline_step,
    simulate,
)


def train(options: argparse.Namespace, device: torch.device) -> None:
    """Train to the end of the data, or for `max_steps`."""
    torch.manual_seed(0)
    model = DemoModel().to(device)
    layout = StageLayout.load(options.layout)
    shape = {"stages": layout.stages, "virtual_stages": layout.virtual_stages}
    places = {"encoder_stage": layout.encoder_stage, "encoder_cut": layout.encoder_cut}
    with PipelineMesh(**shape, **places, timeout_s=PEER_TIMEOUT_S) as mesh:
        chunks = lay_out_model(model, layout)[mesh.stage :: mesh.stages]
        spread = layout.encoder_stage == "spread"  # then every stage has all encoders
        alone = spread or layout.encoder_cut is not None
        encoders = DemoEncoders(model, cut=layout.encoder_cut) if alone else None
        held = torch.nn.ModuleList([*chunks, *([encoders] if spread else [])])
        optimizer = torch.optim.AdamW(held.parameters(), lr=2e-3, betas=(0.9, 0.95))
        hidden = HiddenStates(width=model.config.width, dtype=torch.float32, device=device)
        dataset = ShardDataset(options.service, job=options.job, device=device, parts=mesh.parts)
        with dataset:
            for shard in dataset:
                result = run_pipeline_step(chunks, shard, mesh, hidden, encoders=encoders)
                sum_tied_gradient(chunks, mesh)
                optimizer.step()
                optimizer.zero_grad()
                dataset.commit(shard.step, measured_s=result.seconds, phase_s=result.phase_s)
                timeline = result.timeline  # on all stages, which share it
                if dist.get_rank() == 0:
                    print(
                        f"step {shard.step}  loss {result.loss:.7f}  {result.seconds:.2f} s  "
                        f"bubble {timeline.bubble_fraction:.1%}",
                        flush=True,
                    )
                if shard.step + 1 >= options.max_steps:
                    break
        if dist.get_rank() == 0:
            print(drawn(result, shard, layout))


def drawn(result: PipelineResult, shard: Shard, layout: StageLayout) -> str:
    """A step as measured, simulated and predicted, each stage's lanes below one another."""
    lived, schedule = result.timeline, result.schedule
    ideal = simulate(schedule, lived.forward_s, lived.backward_s, lived.encoder_s)
    lanes = {"measured": lived, "simulated": ideal}
    if layout.seconds is not None:
        lanes["predicted"] = layout.seconds.timeline(shard, schedule)
    return gantt(lanes)


def main() -> None:
    """One rank, as torchrun starts it."""
    parser = arguments("examples.train_pipeline", saves=False)
    parser.add_argument("--layout", required=True, help="what `dataservice layout` wrote")
    options = parser.parse_args()
    with process_group() as device:
        train(options, device)


if __name__ == "__main__":
    main()
