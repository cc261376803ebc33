"""A trainer in the cluster: reads its shards over TLS with its team's token, and resumes.

torchrun starts it; where the service is and what to show it come from the environment.
"""

import os
from pathlib import Path

import torch
import torch.distributed as dist

from trainer_client import ShardDataset, Tls

CHECKPOINT = Path(os.environ["CHECKPOINT_DIR"]) / "checkpoint.pt"
STEPS_PER_CHECKPOINT = 100


def save(state: dict) -> None:
    """Weights, optimizer and the position in the data, all or nothing."""
    saved = {name: part.state_dict() for name, part in state.items()}
    if dist.get_rank() == 0:
        torch.save(saved, CHECKPOINT.with_suffix(".tmp"))
        os.replace(CHECKPOINT.with_suffix(".tmp"), CHECKPOINT)


def main() -> None:
    """Train to the end of the data."""
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    model = torch.nn.Embedding(32_000, 64, device=device)  # your model
    optimizer = torch.optim.AdamW(model.parameters())
    dataset = ShardDataset(
        os.environ["DATASERVICE_ADDRESS"],
        job=os.environ["DATASERVICE_JOB"],
        token_file=os.environ["DATASERVICE_TOKEN_FILE"],  # read again when it is renewed
        tls=Tls(
            ca_file=os.environ["DATASERVICE_CA_FILE"],
            # Of the coordinator and of every worker, whatever the address.
            server_name="dataservice",
        ),
        device=device,
        timeout_s=900.0,  # the service may be moved to another node meanwhile
    )
    state = {"model": model, "optimizer": optimizer, "data": dataset}
    if CHECKPOINT.exists():
        saved = torch.load(CHECKPOINT, map_location=device, weights_only=True)
        for name, part in state.items():
            part.load_state_dict(saved[name])

    for shard in dataset:
        for mb in shard.microbatches:
            if mb.idle:
                continue
            logits = model(mb.input_ids) @ model.weight.T
            loss = torch.nn.functional.cross_entropy(
                logits, mb.labels, ignore_index=-100, reduction="sum"
            )
            (loss / shard.plan.loss_tokens).backward()  # over the whole global batch
        for weight in model.parameters():
            weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
            dist.all_reduce(weight.grad)
        optimizer.step()
        optimizer.zero_grad()
        dataset.commit(shard.step)
        if dist.get_rank() == 0:
            print(f"step {shard.step}: waited {shard.wait_s:.3f} s for data", flush=True)
        if (shard.step + 1) % STEPS_PER_CHECKPOINT == 0:
            save(state)
    save(state)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
