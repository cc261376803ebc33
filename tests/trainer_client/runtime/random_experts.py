"""The small model with experts in place of its layers' last part, spread over replicas.

Each token goes to one expert. A replica sends every peer as many rows for each of its experts,
most of them empty, so that nobody needs to know how many tokens the others have.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests.trainer_client.runtime.random_steps import WIDTH, Model
from tests.trainer_client.runtime.world_device import DEVICE
from trainer_client.runtime import ExpertReduction, FsdpReduction, exchange_features

EXPERTS = 4
ROOM = 200  # tokens for one expert from one replica, more than a microbatch has


class SpreadExperts(nn.Module):
    """Some of EXPERTS experts; without a group, all of them."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
            for _ in range(EXPERTS)
        )
        self.group = None
        self.calls = 0

    def spread(self, group):
        """Keep this member's experts of a group."""
        self.group = group
        share = EXPERTS // group.size
        self.experts = self.experts[group.index * share : (group.index + 1) * share]

    def forward(self, x):
        self.calls += 1
        gates = self.router(x).softmax(-1)
        choice = gates.argmax(-1)
        of_expert = nn.functional.one_hot(choice, EXPERTS)
        place = choice, (of_expert.cumsum(0) * of_expert).sum(-1) - 1
        given = x.new_zeros(EXPERTS, ROOM, WIDTH).index_put(place, x)
        return gates.gather(-1, choice[:, None]) * self.computed(given)[place]

    def computed(self, given):
        """What the experts make of [expert, place, width]."""
        if self.group is None:
            return torch.stack([e(rows) for e, rows in zip(self.experts, given, strict=True)])
        peers = self.group.size
        splits = [EXPERTS // peers * ROOM] * peers
        arrived = exchange_features(given.flatten(0, 1), splits, splits, self.group)
        by_expert = arrived.view(peers, -1, ROOM, WIDTH).unbind(1)
        made = [e(rows) for e, rows in zip(self.experts, by_expert, strict=True)]
        rows = torch.stack(made, 1).flatten(0, 2)
        back = exchange_features(rows, splits, splits, self.group, after=arrived)
        return back.view(EXPERTS, ROOM, WIDTH)


def make_experts():
    """The model with all experts, the same in every process."""
    torch.manual_seed(11)
    model = Model()
    for layer in model.layers:
        layer.mlp = SpreadExperts()
    return model.double().to(DEVICE)


def spread(pool, size, model=None):
    """The model with this replica's experts, and the sum of its gradients; expert groups are of
    `size` consecutive replicas. ``model``: with all experts, by default a new one."""
    model, replica = model or make_experts(), pool.replica
    first = replica - replica % size
    group = pool.apart(range(first, first + size))
    for layer in model.layers:
        layer.mlp.spread(group)
    experts = [layer.mlp.experts for layer in model.layers]
    holders = range(replica % size, pool.replicas, size)
    return model, ExpertReduction(model, pool, experts=experts, holders=holders)


def sharded(pool, size, model=None, **choices):
    """The same, each expert sharded over its holders and everything else over all replicas."""
    model, _ = spread(pool, size, model)
    mesh = init_device_mesh(
        DEVICE.type, (pool.replicas // size, size), mesh_dim_names=("holders", "group")
    )
    experts = [expert for layer in model.layers for expert in layer.mlp.experts]
    for expert in experts:
        fully_shard(expert, mesh=mesh["holders"])
    for part in (*model.encoders.values(), *model.layers, model):
        fully_shard(part)
    return model, FsdpReduction(model, pool.everyone, experts=experts, **choices)


MAKERS = {"spread": spread, "sharded": sharded}


def whole_grad(parameter):
    """A parameter's gradient, of all replicas that have a part of it."""
    grad = parameter.grad
    return grad.full_tensor() if isinstance(grad, DTensor) else grad


def worst_gradient(model, expected, replica, of_group, whole_grad=whole_grad):
    """The largest relative error of a replica's gradients, its experts' being those of its place
    among `of_group`. Collective where they are sharded."""
    first, worst = replica % of_group * (EXPERTS // of_group), 0.0
    for name, parameter in model.named_parameters():
        good = expected[own_name(name, first)]
        difference = (whole_grad(parameter) - good).norm() / good.norm().clamp_min(1e-3)
        worst = max(worst, float(difference))
    return worst


def own_name(name, first):
    """The name that a parameter has where all experts are in one process."""
    if ".experts." not in name:
        return name
    layer, _, rest = name.partition(".experts.")
    number, _, part = rest.partition(".")
    return f"{layer}.experts.{int(number) + first}.{part}"
