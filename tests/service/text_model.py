"""A small model for ranks that train text of a real tokenizer."""

import torch
from torch import nn

from tests.trainer_client.runtime.random_steps import WIDTH, Model

VOCABULARY = 4096


class TextModel(Model):
    """The runtime's small model, with the tokens of a real tokenizer."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)


def text_model():
    """The same parameters every time, float64."""
    torch.manual_seed(3)
    return TextModel().double()
