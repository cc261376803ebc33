"""Train a model of transformers, sharded with FSDP2, fed by a running service.

    torchrun --nproc-per-node 4 -m examples.train_transformers --model Qwen/Qwen2.5-VL-7B-Instruct \
        --service 127.0.0.1:50051 --job vlm-sft

The job's processors and tokenizer are those of the model. Start it again with the same --checkpoint
and it goes on from there, also on another number of ranks.
"""

import torch
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForImageTextToText  # AutoModelForCausalLM for text alone
from transformers.modeling_layers import GradientCheckpointingLayer

from examples.train_ddp import arguments, process_group
from examples.train_fsdp2 import train
from trainer_client.adapters.transformers import TrainableModel, trainable


def sharded_model(path: str, device: torch.device) -> TrainableModel:
    """Every layer of encoder and decoder on its own, then the rest: all must be sharded."""
    library = AutoModelForImageTextToText.from_pretrained(path)
    library.gradient_checkpointing_enable()
    model = trainable(library).to(device)
    for part in library.modules():
        if isinstance(part, GradientCheckpointingLayer):
            fully_shard(part)
    return fully_shard(model)


def main() -> None:
    """One rank, as torchrun starts it."""
    parser = arguments("examples.train_transformers")
    parser.add_argument("--model", required=True, help="folder or repository of the model")
    options = parser.parse_args()
    with process_group() as device:
        train(options, sharded_model(options.model, device), device, learning_rate=1e-5)


if __name__ == "__main__":
    main()
