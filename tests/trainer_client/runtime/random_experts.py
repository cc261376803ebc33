"""The small model with experts in place of its layers' last part, spread over replicas.

Each token goes to one expert. A replica sends every peer as many rows for each of its experts,
most of them empty, so that nobody needs to know how many tokens the others have.
"""

import torch
from torch import nn

from tests.trainer_client.runtime.random_steps import WIDTH, Model
from tests.trainer_client.runtime.world_device import DEVICE
from trainer_client.runtime import exchange_features

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
