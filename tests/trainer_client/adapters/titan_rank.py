"""One rank of torchtitan's own trainer over a running service, on a CPU.

    python -m torch.distributed.run ... titan_rank.py train OUT ADDRESS TOKENIZER REPLICATE TENSOR
    python -m torch.distributed.run ... titan_rank.py refuse

torchtitan knows GPUs only. What it asks of one is answered for a CPU here, each where it asks; its
trainer, model, masks, optimizer, FSDP and checkpoints are its own. Not run, therefore: flex and
varlen kernels (the mask that torchtitan builds for flex is given to torch's plain attention), the
`spmd_types` backend, which needs a later torch, and compiling.
"""

import json
import sys
import types
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torchtitan.tools.utils as titan_utils
from torch.distributed.fsdp import FSDPModule
from torch.nn.attention.flex_attention import create_mask

titan_utils.device_type, titan_utils.device_module = "cpu", torch.cpu  # before all others read it
KERNELS = "torchtitan.distributed.minimal_async_ep.kernels"  # of experts, in triton
sys.modules[KERNELS] = types.ModuleType(KERNELS)
sys.modules[KERNELS].__getattr__ = lambda name: None  # type: ignore[method-assign]

import torchtitan.components.metrics as titan_metrics  # noqa: E402
import torchtitan.distributed.utils as titan_distributed  # noqa: E402
from torchtitan.components.checkpoint import CheckpointManager  # noqa: E402
from torchtitan.components.loss import CrossEntropyLoss  # noqa: E402
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw  # noqa: E402
from torchtitan.config import ParallelismConfig, TrainingConfig  # noqa: E402
from torchtitan.models.common.attention import (  # noqa: E402
    FlexAttention,
    ScaledDotProductAttention,
)
from torchtitan.models.llama3 import model_registry  # noqa: E402

from tests.trainer_client.runtime.planned_steps import planned_steps  # noqa: E402
from trainer_client import BadArgument, MisuseError  # noqa: E402
from trainer_client.adapters.torchtitan import ShardLoader, ShardTrainer, titan_batch  # noqa: E402


class NoMemory:
    """There is no GPU memory to watch."""

    device_name = "cpu"

    def get_peak_stats(self):
        return titan_metrics.DeviceMemStats(0, 0, 0, 0, 0, 0)

    def reset_peak_stats(self):
        pass


def attention_on_a_cpu(q, k, v, *, block_mask, scale, enable_gqa, **_):
    """Flex attention has no backward on a CPU; its mask is torchtitan's."""
    mask = create_mask(block_mask.mask_mod, q.shape[0], None, q.shape[2], k.shape[2], device="cpu")
    attend = torch.nn.functional.scaled_dot_product_attention
    return attend(q, k, v, attn_mask=mask, scale=scale, enable_gqa=enable_gqa), None


titan_metrics.build_device_memory_monitor = NoMemory
titan_distributed.set_pg_timeouts = lambda **_: None  # its barrier names a GPU
FlexAttention.compiled_flex_attn = staticmethod(attention_on_a_cpu)


class Trainer(ShardTrainer):
    """Also works out each pack's loss one sample at a time, where the weights are whole."""

    alone: list[tuple[float, float]]

    def forward_backward_step(self, *, input_dict, labels, global_valid_tokens):
        given = {"input_dict": input_dict, "labels": labels}
        if dist.get_world_size() > 1:
            return super().forward_backward_step(**given, global_valid_tokens=global_valid_tokens)
        inputs, positions = input_dict["input"], input_dict["positions"]
        starts = (positions[0] == 0).nonzero().flatten().tolist()
        alone = sum(
            self.of_one(inputs[:, start:end], labels[:, start:end], positions[:, start:end])
            for start, end in pairwise([*starts, positions.shape[1]])
        )
        loss = super().forward_backward_step(**given, global_valid_tokens=global_valid_tokens)
        self.alone.append((float(loss * global_valid_tokens), alone))
        return loss

    @torch.no_grad()
    def of_one(self, inputs, labels, positions):
        model = self.model_parts[0]
        masks = model.get_attention_masks(positions)
        logits = model(inputs, positions=positions, attention_masks=masks)
        entropy = torch.nn.functional.cross_entropy
        return float(entropy(logits[0], labels[0], ignore_index=-100, reduction="sum"))


def config_of(out="", address="", tokenizer="", *, replicate=1, tensor=1, **changed):
    """A small Llama over the job `text`."""
    spec = model_registry("debugmodel", attn_backend="flex")
    spec.model.layers = spec.model.layers[:2]
    for layer in spec.model.layers:
        layer.attention.inner_attention = changed.get("attention", FlexAttention.Config())
    return ShardTrainer.Config(
        loss=CrossEntropyLoss.Config(global_vocab_size=2048),
        hf_assets_path=tokenizer,
        model_spec=spec,
        dump_folder=out,
        optimizer=default_adamw(lr=8e-4),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2),
        training=TrainingConfig(
            **{
                "local_batch_size": 1,
                "seq_len": 1024,
                "steps": 4,
                "disable_cuda_graphs": True,
                "mixed_precision_param": "float32",
                **changed.get("training", {}),
            }
        ),
        dataloader=ShardLoader.Config(address=address, job="text", timeout_s=120),
        metrics=titan_metrics.MetricsProcessor.Config(log_freq=1),
        parallelism=ParallelismConfig(
            data_parallel_replicate_degree=replicate,
            tensor_parallel_degree=tensor,
            spmd_backend="partial_dtensor",
            **changed.get("parallelism", {}),
        ),
        checkpoint=CheckpointManager.Config(enable=True, interval=2, last_save_model_only=False),
        activation_checkpoint=None,
    )


def train(out, address, tokenizer, replicate, tensor):
    """Four steps, with a checkpoint after every second one."""
    trainer = Trainer(config_of(out, address, tokenizer, replicate=replicate, tensor=tensor))
    trainer.alone, losses = [], {}
    for module in trainer.model_parts[0].modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo knows no other
    trainer.metrics_processor.log = lambda step, loss, *_, **__: losses.update({step: loss})
    trainer.train()
    position = trainer.dataloader.state_dict()["step"]
    trainer.close()
    answer = {"losses": losses, "alone": trainer.alone, "position": position}
    Path(out, f"rank{dist.get_rank()}.json").write_text(json.dumps(answer))


def refused(call, said, error=BadArgument):
    with pytest.raises(error, match=said):
        call()


def refuse():
    """What torchtitan would train differently than it was planned."""
    for name in ("context", "pipeline"):
        parallelism = {f"{name}_parallel_degree": 2}
        refused(lambda chosen=parallelism: config_of(parallelism=chosen), "Set it to 1")
    refused(lambda: config_of(training={"local_batch_size": 2}), "the job's batch decides")
    refused(lambda: config_of(training={"global_batch_size": 8}), "the job's batch decides")
    refused(lambda: config_of(training={"disable_cuda_graphs": False}), "one shape")
    refused(lambda: config_of(attention=ScaledDotProductAttention.Config()), "see one another")

    loader = config_of(address="127.0.0.1:1").dataloader.build(
        dp_world_size=1, dp_rank=0, seq_len=64
    )
    _, steps = planned_steps(4, 2)
    packs = [mb for shards in steps for shard in shards for mb in shard.microbatches]
    shared = next(mb for mb in packs if len(mb.cp_group) > 1)
    media = next(mb for mb in packs if len(mb.cp_group) == 1 and mb.vision is not None)
    text = replace(media, vision=None, audio=None)
    refused(lambda: titan_batch(shared, longest_tokens=4096), "static_degree: 1")
    refused(lambda: titan_batch(media, longest_tokens=4096), "images or sound")
    refused(lambda: titan_batch(text, longest_tokens=4), "training.seq_len is 4")
    mrope = replace(text, mrope=text.position_ids.expand(3, -1))
    refused(lambda: titan_batch(mrope, longest_tokens=4096), "M-RoPE")
    refused(lambda: next(iter(loader)), "Train with ShardTrainer", MisuseError)


if __name__ == "__main__":
    if sys.argv[1] == "train":
        train(*sys.argv[2:5], *map(int, sys.argv[5:]))
    else:
        dist.init_process_group("gloo")
        refuse()
    dist.destroy_process_group()
