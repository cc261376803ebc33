"""Transformers' own roundings to float32, left out.

The library computes in float32 whatever the model's type: the weight of a norm (Gemma, Cohere),
whose gradient is then a sum over rows in float32, and rotary embeddings (DeepSeek). Such a sum
depends on its order, and a pack has other rows beside one another than a sample alone. So two
exact runs differ there by 1e-7. With these casts left out, all that remains is fp64.
"""

import inspect

import torch
from torch.overrides import TorchFunctionMode

CASTS = {torch.Tensor.float, torch.Tensor.to, torch.Tensor.type}


class LibraryInDouble(TorchFunctionMode):
    """While it is entered, casts of fp64 to float32 in transformers' modules do nothing; casts of
    this package's are done. `left_out` counts them."""

    def __init__(self):
        super().__init__()
        self.left_out = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function in CASTS and self._rounds(function, args, kwargs) and called_by_library():
            self.left_out += 1
            return args[0]
        return function(*args, **kwargs)

    @staticmethod
    def _rounds(function, args, kwargs):
        wanted = function is torch.Tensor.float or torch.float32 in (*args[1:], *kwargs.values())
        return wanted and args[0].dtype == torch.float64


def called_by_library():
    """Whether the first caller outside of torch and of this file is one of transformers' models."""
    frame = inspect.currentframe()
    while frame.f_globals["__name__"] == __name__ or frame.f_globals["__name__"].startswith(
        "torch."
    ):
        frame = frame.f_back
    return frame.f_globals["__name__"].startswith("transformers.models.")
