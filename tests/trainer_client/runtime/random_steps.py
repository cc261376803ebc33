"""A small model, random global batches, random plans for them, and what a single process gives.

Where: see ``world_device.py``.
"""

import types
from dataclasses import replace

import numpy as np
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from tests.trainer_client.runtime.whole_attention import dense_attention
from tests.trainer_client.runtime.world_device import DEVICE
from trainer_client.device import DeviceCopier
from trainer_client.runtime import forward_microbatch, scatter_rows
from trainer_client.synthetic import SyntheticItem, SyntheticSample, SyntheticStep

VOCABULARY, WIDTH, HEADS, KV_HEADS, LAYERS = 13, 8, 4, 2, 2
LONGEST = 64  # of random samples
PLACES = 1200  # of any sample
ITEM_WIDTH = {"vision": 5, "audio": 3}

# A small model, in the shape that run_step asks for.


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        head = WIDTH // HEADS
        self.q = nn.Linear(WIDTH, WIDTH)
        self.kv = nn.Linear(WIDTH, 2 * KV_HEADS * head)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, WIDTH))

    def forward(self, x, attention):
        q = self.q(x).unflatten(-1, (HEADS, -1))
        k, v = self.kv(x).unflatten(-1, (2, KV_HEADS, WIDTH // HEADS)).unbind(1)
        x = x + self.out(attention(q, k, v).flatten(1))
        return x + self.mlp(torch.tanh(x))


class Model(nn.Module):
    """`frozen` names encoders, or the "decoder" with its embeddings and head."""

    def __init__(self, frozen=()):
        super().__init__()
        self.frozen = frozen
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Embedding(PLACES, WIDTH)
        self.encoders = nn.ModuleDict(
            {
                name: nn.Sequential(nn.Linear(width, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
                for name, width in ITEM_WIDTH.items()
            }
        )
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.requires_grad_("decoder" not in frozen)
        for name, encoder in self.encoders.items():
            encoder.requires_grad_(name not in frozen)

    def forward(self, microbatch, groups):
        return forward_microbatch(self, microbatch, groups)

    def encode(self, modality, batch):
        return self.encoders[modality](torch.cat(batch.items))

    def dummy_item(self, modality):
        return torch.ones(1, ITEM_WIDTH[modality], dtype=torch.float64, device=DEVICE)

    def encoder_trains(self, modality):
        return modality not in self.frozen

    def decode(self, microbatch, features, attention):
        x = self.tokens(microbatch.input_ids)
        for found in features.values():
            x = scatter_rows(x, found.rows, found.positions)
        return self.decoder(x, microbatch.position_ids, attention)

    def decoder(self, x, position_ids, attention):
        x = x + self.places(position_ids)
        for layer in self.layers:
            x = layer(x, attention)
        return self.head(x)


def make_model(frozen):
    torch.manual_seed(7)
    return Model(frozen).double().to(DEVICE)


# The same model as trainers wrap it.


def wrapped(how, frozen):
    model = make_model(frozen)
    if how == "plain":
        return model
    if how == "ddp":
        return DistributedDataParallel(model, find_unused_parameters=True)
    mesh = None
    if how == "hsdp":
        ranks = torch.distributed.get_world_size()
        mesh = init_device_mesh(DEVICE.type, (2, ranks // 2), mesh_dim_names=("replicate", "shard"))
    for part in (*model.encoders.values(), *model.layers):
        fully_shard(part, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def whole(model):
    """The model's gradients, unsharded, in a plain model."""
    plain = make_model(())
    source = model.module if isinstance(model, DistributedDataParallel) else model
    for target, parameter in zip(plain.parameters(), source.parameters(), strict=True):
        if parameter.grad is not None:
            grad = parameter.grad
            target.grad = (grad.full_tensor() if isinstance(grad, DTensor) else grad).double()
    return plain


# A global batch, and the loss and gradients of a plain loop over its samples.


def random_samples(seed):
    rng = np.random.default_rng(seed)
    samples = []
    for _ in range(int(rng.integers(5, 16))):
        length = int(rng.integers(1, LONGEST))
        ids = torch.from_numpy(rng.integers(0, VOCABULARY, length))
        labels = torch.from_numpy(rng.integers(0, VOCABULARY, length))
        labels[torch.from_numpy(rng.random(length) < 0.3)] = -100
        samples.append(
            types.SimpleNamespace(ids=ids, labels=labels, items=random_items(rng, length))
        )
    return samples


def one_token(seed):
    """A sample of one token, with a label."""
    ids = torch.tensor([seed % VOCABULARY])
    return types.SimpleNamespace(ids=ids, labels=ids, items=[])


def random_items(rng, length):
    """(modality, rows [r, width], first position), one behind the other."""
    items, position = [], 0
    while rng.random() < 0.7:
        position += int(rng.integers(0, 6))
        rows = int(rng.integers(1, 9))
        if position + rows > length:
            break
        modality = str(rng.choice(list(ITEM_WIDTH)))
        values = torch.from_numpy(rng.standard_normal((rows, ITEM_WIDTH[modality])))
        items.append((modality, values, position))
        position += rows
    return items


def sample_logits(model, sample):
    x = model.tokens(sample.ids.to(DEVICE))
    for modality, rows, position in sample.items:
        encoded = model.encoders[modality](rows.to(DEVICE))
        x = torch.cat([x[:position], encoded, x[position + len(rows) :]])
    return model.decoder(x, torch.arange(len(x), device=DEVICE), dense_attention)


def weighed(samples, seed):
    """The same samples with random loss weights, 0 among them; one lost its labels by masking."""
    rng = np.random.default_rng(seed)
    weights = [0.0, 0.3, *rng.choice([0.0, 0.25, 1.0, 1 / 3, 7.5], len(samples) - 2)]
    for sample, weight in zip(samples, weights, strict=True):
        sample.weight = float(weight)
    samples[-1].labels[:] = -100
    return samples


def weight_of(sample):
    return getattr(sample, "weight", 1.0)


def single_process(model, samples):
    total = sum(weight_of(s) * int((s.labels != -100).sum()) for s in samples)
    loss_sum = 0.0
    for sample in samples:
        logits = sample_logits(model, sample)
        own = cross_entropy(logits, sample.labels.to(DEVICE), reduction="sum")
        loss_sum = loss_sum + weight_of(sample) * own
    loss = loss_sum / total
    loss.backward()
    return float(loss.detach()), {n: p.grad for n, p in model.named_parameters()}


# A random plan for it, and one replica's shard.


def random_plan(samples, replicas, degrees, seed):
    """Waves of (members, samples), in which some replicas may be idle."""
    rng = np.random.default_rng(seed)
    left = list(rng.permutation(len(samples)))
    waves = []
    while left:
        free, wave = list(rng.permutation(replicas)), []
        while free and left:
            degree = min(int(rng.choice(degrees)), len(free))
            members, free = tuple(int(r) for r in free[:degree]), free[degree:]
            pack = [int(left.pop()) for _ in range(min(len(left), int(rng.integers(1, 4))))]
            wave.append((members, pack))
        waves.append(wave)
    return waves


def make_shard(samples, waves, replicas, replica, seed, digest="ab"):
    """The shard of `replica`, items encoded by random replicas. A sample's item is (modality,
    values, first position, tokens), without tokens where each value is one."""
    rng = np.random.default_rng(seed + 1)
    step = SyntheticStep(
        [synthetic(number, sample) for number, sample in enumerate(samples)],
        waves,
        replicas=replicas,
        job="parity",
        encoders=lambda tokens, replicas: rng.integers(0, replicas, size=len(tokens)),
    )
    shard = step.shard(replica)
    shard = replace(shard, plan=replace(shard.plan, digest=digest))
    return shard if DEVICE.type == "cpu" else DeviceCopier(DEVICE).send(shard)


def synthetic(number, sample):
    return SyntheticSample(
        id=number,
        input_ids=sample.ids,
        labels=sample.labels,
        weight=weight_of(sample),
        items=tuple(synthetic_item(*item) for item in sample.items),
    )


def synthetic_item(modality, values, position, tokens=None):
    """`values` are rows, or of an image of a foreign model with its grid."""
    grid = getattr(values, "grid", None)
    return SyntheticItem(
        modality=modality,
        values=values if grid is None else values.values,
        position=position,
        tokens=len(values) if tokens is None else tokens,
        kind=-1 if grid is None else 0,
        grid=grid or (0, 0, 0, 0),
    )


# The comparison.


def worst_difference(result, model, loss, grads):
    """Largest relative difference of loss and gradients; 1 where one side has none."""
    worst = abs(result.loss - loss) / abs(loss)
    for name, parameter in model.named_parameters():
        good = grads[name]
        if (good is None) != (parameter.grad is None):
            return name, 1.0
        if good is not None:
            scale = good.norm().clamp_min(1e-3)
            worst = max(worst, float((parameter.grad - good).norm() / scale))
    return "all", worst
