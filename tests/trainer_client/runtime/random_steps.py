"""A small model, random global batches, random plans for them, and what a single process gives."""

import types

import numpy as np
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from tests.trainer_client.runtime.whole_attention import dense_attention
from trainer_client.runtime import forward_microbatch, scatter_rows
from trainer_client.shard import (
    FeatureExchange,
    Group,
    Microbatch,
    ModalityBatch,
    PlanSummary,
    Shard,
    Wave,
)

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
        for name in frozen:
            self.encoders[name].requires_grad_(False)

    def forward(self, microbatch, groups):
        return forward_microbatch(self, microbatch, groups)

    def encode(self, modality, batch):
        return self.encoders[modality](torch.cat(batch.items))

    def dummy_item(self, modality):
        return torch.ones(1, ITEM_WIDTH[modality], dtype=torch.float64)

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
    return Model(frozen).double()


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
        mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("replicate", "shard"))
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
    x = model.tokens(sample.ids)
    for modality, rows, position in sample.items:
        encoded = model.encoders[modality](rows)
        x = torch.cat([x[:position], encoded, x[position + len(rows) :]])
    return model.decoder(x, torch.arange(len(sample.ids)), dense_attention)


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
        own = cross_entropy(logits, sample.labels, reduction="sum")
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


def local_layout(pack, samples, members, replica):
    """This replica's (sample, position or None for padding), and the padded lengths."""
    degree, index = len(members), members.index(replica)
    unit = 2 * degree if degree > 1 else 1
    padded = [-(-len(samples[s].ids) // unit) * unit for s in pack]
    rows = []
    for s, room in zip(pack, padded, strict=True):
        chunk = room // unit
        held = [0] if degree == 1 else [index, unit - 1 - index]
        places = [p for c in held for p in range(c * chunk, (c + 1) * chunk)]
        rows += [(s, p, p < len(samples[s].ids)) for p in places]
    return rows, padded


def make_shard(samples, waves, replicas, replica, seed, digest="ab"):
    rng = np.random.default_rng(seed + 1)
    microbatches = []
    for number, wave in enumerate(waves):
        layouts = {r: ([], []) for r in range(replicas)}
        for members, pack in wave:
            for member in members:
                layouts[member] = local_layout(pack, samples, members, member)
        batches = {
            name: modality_batch(name, wave, samples, layouts, replicas, replica, rng)
            for name in ITEM_WIDTH
        }
        mine = [(m, pack) for m, pack in wave if replica in m]
        members, pack = mine[0] if mine else ((replica,), [])
        microbatches.append(
            microbatch(number, members, pack, samples, layouts[replica], replica, batches)
        )
    groups = [
        Wave(
            index=k,
            groups=tuple(Group(pack=0, replicas=m, tokens=0, predicted_s=0.0) for m, _ in wave),
            idle=(),
        )
        for k, wave in enumerate(waves)
    ]
    plan = PlanSummary(
        digest=digest, replicas=replicas, samples=len(samples), loss_tokens=0, predicted_s=0.0,
        waves=tuple(groups), stages=(),
        weighted_loss_tokens=1.0 if any(weight_of(s) != 1 for s in samples) else None,
    )  # fmt: skip
    return Shard(
        job="parity", attempt=0, step=0, rank=replica, replica=replica, cursor_after="",
        plan=plan, microbatches=tuple(microbatches), size_bytes=0,
    )  # fmt: skip


def microbatch(number, members, pack, samples, layout, replica, batches):
    rows, padded = layout
    pick = {"ids": [], "labels": [], "positions": []}
    for s, p, real in rows:
        pick["ids"].append(int(samples[s].ids[p]) if real else 0)
        pick["labels"].append(int(samples[s].labels[p]) if real else -100)
        pick["positions"].append(p)
    ids, labels, positions = (torch.tensor(v, dtype=torch.int64) for v in pick.values())
    weights = torch.tensor([weight_of(samples[s]) for s, *_ in rows], dtype=torch.float64)
    weighs = any(weight_of(sample) != 1 for sample in samples)
    return Microbatch(
        wave=number,
        pack=0 if pack else -1,
        cp_group=members,
        cp_rank=members.index(replica),
        predicted_s=0.0,
        input_ids=ids,
        labels=labels,
        position_ids=positions,
        cu_seqlens=torch.tensor([0, *np.cumsum(padded)], dtype=torch.int32),
        lengths=torch.tensor([len(samples[s].ids) for s in pack], dtype=torch.int32),
        sample_ids=torch.tensor(pack, dtype=torch.int64),
        weights=weights if weighs else None,
        **batches,
    )


def modality_batch(name, wave, samples, layouts, replicas, replica, rng):
    """Items of the wave dealt to random replicas; None when the wave has none.

    A sample's item is (modality, values, first position, tokens), without tokens where each value
    is one.
    """
    items = [
        (s, values, position, *tokens)
        for _, pack in wave
        for s in pack
        for modality, values, position, *tokens in samples[s].items
        if modality == name
    ]
    if not items:
        return None
    encoder = rng.integers(0, replicas, size=len(items))
    local = {(s, p): (r, k) for r, (rows, _) in layouts.items() for k, (s, p, _) in enumerate(rows)}
    encoded_rows = [0] * replicas
    moves = [[[] for _ in range(replicas)] for _ in range(replicas)]  # [source][destination]
    for (s, values, position, *tokens), source in zip(items, encoder, strict=True):
        for offset in range(*tokens or (len(values),)):
            destination, place = local[s, position + offset]
            moves[source][destination].append((encoded_rows[source], place))
            encoded_rows[source] += 1
    sent = [move for to in moves[replica] for move in to]
    received = [move for source in moves for move in source[replica]]
    return ModalityBatch(
        items=[item[1] for item, r in zip(items, encoder, strict=True) if r == replica],
        exchange=FeatureExchange(
            send_rows=torch.tensor([row for row, _ in sent], dtype=torch.int64),
            send_splits=[len(to) for to in moves[replica]],
            recv_splits=[len(source[replica]) for source in moves],
            recv_positions=torch.tensor([place for _, place in received], dtype=torch.int64),
        ),
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
