"""torchtitan's trainer on the service: its loop, its FSDP and HSDP, its checkpoints.

torchtitan 0.3 builds everything from a config. Two of its parts are replaced here: the data loader,
which gives one pack at a time, and the trainer, which learns from each step how many packs it has
(torchtitan accumulates the gradients of a fixed number).

    from torchtitan.models.llama3 import model_registry
    from trainer_client.adapters.torchtitan import ShardLoader, ShardTrainer

    def chat() -> ShardTrainer.Config:  # in config_registry.py of your package
        return ShardTrainer.Config(
            model_spec=model_registry("8B", attn_backend="flex"),  # or "varlen"
            dataloader=ShardLoader.Config(address="data-service:50051", job="chat"),
            training=TrainingConfig(local_batch_size=1, seq_len=8192, disable_cuda_graphs=True),
            ...,
        )

    torchrun --nproc-per-node 8 -m torchtitan.train --module my_package --config chat

The job's packs must be of degree 1 (`plan: {strategy: packing, static_degree: 1}`), its samples
text, and no longer than `training.seq_len`. Positions begin again at 0 with each sample, which is
how torchtitan's flex and varlen attention keep samples apart; its plain attention does not, and is
refused. With tensor parallelism of T, the job's topology says `tensor_parallel: T`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torchtitan.components.dataloader import BaseDataLoader, DataloaderExhaustedError
from torchtitan.models.common.attention import FlexAttention, VarlenAttention
from torchtitan.trainer import Trainer

from trainer_client.dataset import ShardDataset
from trainer_client.errors import BadArgument, MisuseError
from trainer_client.shard import IGNORED_LABEL, Microbatch, Shard

Batch = tuple[dict[str, torch.Tensor], torch.Tensor]


class ShardLoader(BaseDataLoader):
    """Gives `({"input", "positions"}, labels)`, int64 [1, tokens] each, a pack at a time.

    `ShardTrainer` calls `next_step` before the packs of a step and `commit` after them. The state
    is the position of `ShardDataset`: the same on every rank, exact, and good for any number of
    ranks, unlike that of torchtitan's own loaders.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        address: str = "127.0.0.1:50051"
        """host:port of the service"""

        job: str = ""
        """The job's name"""

        token_file: str | None = None
        """File with the team's token; DATASERVICE_TOKEN_FILE and DATASERVICE_TOKEN also count"""

        tls: bool = False
        """Whether to trust the system's certificates and talk TLS"""

        prefetch_steps: int = 2
        """Steps kept ready ahead of the one that trains"""

        timeout_s: float = 300.0
        """Longest wait for a step, for other ranks, or for a lost worker"""

    def __init__(
        self, config: Config, *, dp_world_size: int, dp_rank: int, seq_len: int, **_: Any
    ) -> None:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        if rank // (ranks // dp_world_size) != dp_rank:
            raise BadArgument(
                f"rank {rank} of {ranks} is replica {dp_rank} of {dp_world_size} to torchtitan, "
                "which the service does not number so. Use data and tensor parallelism only."
            )
        self._dataset = ShardDataset(
            config.address,
            job=config.job,
            rank=rank,
            world_size=ranks,
            token_file=config.token_file,
            tls=config.tls or None,
            prefetch_steps=config.prefetch_steps,
            timeout_s=config.timeout_s,
        )
        self._dataset.expect_commits()
        self._longest_tokens = seq_len
        self._shards: Iterator[Shard] | None = None
        self._step = -1
        self.wait_s = 0.0  # seconds for which the step that was taken last blocked the loop
        self._waiting: list[Microbatch] = []

    def next_step(self) -> int:
        """Take the next step; returns its number of packs, the same on every rank.

        Raises torchtitan's DataloaderExhaustedError at the end of the data.
        """
        if self._waiting:
            raise MisuseError(f"step {self._step} has {len(self._waiting)} packs left to train.")
        if self._shards is None:
            self._shards = iter(self._dataset)
        shard = next(self._shards, None)
        if shard is None:
            raise DataloaderExhaustedError
        self._step, self.wait_s = shard.step, shard.wait_s
        self._waiting = list(shard.microbatches)
        return len(self._waiting)

    def __iter__(self) -> Iterator[Batch]:
        """The packs of the steps that `next_step` took."""
        while True:
            if not self._waiting:
                raise MisuseError(
                    "a pack was asked for beyond those of the step: steps differ in their number "
                    "of packs. Train with ShardTrainer of this module, which follows them."
                )
            yield titan_batch(self._waiting.pop(0), longest_tokens=self._longest_tokens)

    def commit(self) -> None:
        """The optimizer has stepped with all packs of the step."""
        self._dataset.commit(self._step)

    def state_dict(self) -> dict[str, Any]:
        """The position after the last committed step."""
        return dict(self._dataset.state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue behind that position. An empty state is the beginning, as in torchtitan."""
        if state_dict:
            self._dataset.load_state_dict(state_dict)

    def close(self) -> None:
        """Give up the rank."""
        self._dataset.close()


def titan_batch(microbatch: Microbatch, *, longest_tokens: int) -> Batch:
    """A pack as torchtitan's models take it. One token without a label where the rank is idle: the
    others gather weights, and this rank must run the model with them.

    Raises BadArgument where they would compute something else than was planned: packs shared by
    replicas, with images or sound, with M-RoPE, with loss weights, or with a sample beyond
    `longest_tokens`.
    """
    where = f"a pack of wave {microbatch.wave}"
    if len(microbatch.cp_group) > 1:
        raise BadArgument(
            f"{where} is shared by {len(microbatch.cp_group)} replicas, and torchtitan's context "
            "parallelism knows only groups that never change. Give the job plan: {strategy: "
            "packing, static_degree: 1}, and max_sample_tokens of what one replica holds."
        )
    if microbatch.vision is not None or microbatch.audio is not None:
        raise BadArgument(
            f"{where} has images or sound, which this adapter would leave out: it trains text. Use "
            "trainer_client.runtime.run_step with FSDP2 for them."
        )
    if microbatch.weights is not None:
        raise BadArgument(
            f"{where} has loss weights, and torchtitan's loss takes labels alone. Use "
            "trainer_client.runtime.run_step with FSDP2, or take loss_weight out of the job file."
        )
    if microbatch.idle:
        nothing = torch.zeros((1, 1), dtype=torch.int64)
        return {"input": nothing, "positions": nothing}, nothing + IGNORED_LABEL
    longest = int(microbatch.lengths.max())
    if longest > longest_tokens:
        raise BadArgument(
            f"{where} has a sample of {longest} tokens, and training.seq_len is {longest_tokens}, "
            "which bounds its positions. Raise it, or give the job's pipeline max_sample_tokens of "
            "as many."
        )
    positions = microbatch.positions
    if positions.ndim > 1:
        raise BadArgument(
            "the job's processor counts positions by M-RoPE, and this adapter's models by one "
            "number a token. Give the job's pipeline positions: sequence."
        )
    inputs = {"input": microbatch.input_ids[None], "positions": positions[None]}
    return inputs, microbatch.labels[None]


class ShardTrainer(Trainer):
    """torchtitan's Trainer, with as many packs accumulated in a step as the plan has."""

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        dataloader: ShardLoader.Config = field(default_factory=ShardLoader.Config)

        def __post_init__(self) -> None:
            Trainer.Config.__post_init__(self)
            _check(self)

    dataloader: ShardLoader

    def train_step(self, data_iterator: Iterator[Batch]) -> None:
        """One step of the job; committed before torchtitan saves a checkpoint of it."""
        self.gradient_accumulation_steps = self.dataloader.next_step()
        self.metrics_processor.data_loading_times.append(self.dataloader.wait_s)
        super().train_step(data_iterator)
        self.dataloader.commit()

    def close(self) -> None:
        """Also give up the rank at the service."""
        if hasattr(self, "dataloader"):
            self.dataloader.close()
        super().close()


def _check(config: Trainer.Config) -> None:
    """Raise BadArgument where torchtitan would train something else than the plan."""
    parallelism, training = config.parallelism, config.training
    for name in ("context_parallel_degree", "pipeline_parallel_degree"):
        if getattr(parallelism, name) != 1:
            raise BadArgument(
                f"parallelism.{name} is {getattr(parallelism, name)}: packs differ in length and "
                "number, which torchtitan's schedules do not allow. Set it to 1, and use data and "
                "tensor parallelism."
            )
    if training.local_batch_size != 1 or training.global_batch_size > 0:
        raise BadArgument(
            f"training.local_batch_size is {training.local_batch_size} and global_batch_size "
            f"{training.global_batch_size}: the job's batch decides. Set local_batch_size to 1, "
            "and leave global_batch_size alone."
        )
    if not training.disable_cuda_graphs:
        raise BadArgument(
            "CUDA graphs replay one shape, and packs differ in length. Set "
            "training.disable_cuda_graphs."
        )
    attention = getattr(config.model_spec and config.model_spec.model, "first_attention", None)
    inner = getattr(attention, "inner_attention", None)
    if inner is not None and not isinstance(inner, FlexAttention.Config | VarlenAttention.Config):
        raise BadArgument(
            f"the model's attention is {type(inner).__qualname__}, in which the samples of a pack "
            "see one another. Build the model with attn_backend='flex' or 'varlen'."
        )
