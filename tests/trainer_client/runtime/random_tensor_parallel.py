"""The small model of ``random_steps`` whose layers tensor ranks share, by torch's own styles."""

from torch import nn
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from tests.trainer_client.runtime.random_steps import HEADS, KV_HEADS, WIDTH, make_model
from tests.trainer_client.runtime.world_device import DEVICE

HEAD_DIM = WIDTH // HEADS


class SplitLayer(nn.Module):
    """A layer whose keys and values have weights of their own, so that each is cut by heads."""

    def __init__(self):
        super().__init__()
        self.q = nn.Linear(WIDTH, HEADS * HEAD_DIM)
        self.k = nn.Linear(WIDTH, KV_HEADS * HEAD_DIM)
        self.v = nn.Linear(WIDTH, KV_HEADS * HEAD_DIM)
        self.out = nn.Linear(HEADS * HEAD_DIM, WIDTH)
        self.up = nn.Linear(WIDTH, 16)
        self.down = nn.Linear(16, WIDTH)

    def forward(self, x, attention):
        q, k, v = (part(x).unflatten(-1, (-1, HEAD_DIM)) for part in (self.q, self.k, self.v))
        x = x + self.out(attention(q, k, v).flatten(1))
        return x + self.down(nn.functional.gelu(self.up(x.tanh())))


STYLES = {
    "q": ColwiseParallel,
    "k": ColwiseParallel,
    "v": ColwiseParallel,
    "out": RowwiseParallel,
    "up": ColwiseParallel,
    "down": RowwiseParallel,
}


def make_split_model():
    """The whole model, the same in every process."""
    model = make_model(())
    model.layers = nn.ModuleList(SplitLayer() for _ in model.layers).double().to(DEVICE)
    return model


def over_tensor_ranks(model, mesh):
    """The model whose layers this mesh's ranks share; everything else all of them have."""
    for layer in model.layers:
        parallelize_module(layer, mesh, {name: style() for name, style in STYLES.items()})
    return model
