"""Heads of transformers whose loss is taken without logits, whatever their model makes of those."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.trainer_client.adapters.foreign_models import (
    FAMILIES,
    PROCESSOR,
    VOCABULARY,
    Text,
    one_at_a_time,
)
from tests.trainer_client.adapters.foreign_steps import samples_of, shard_of
from tests.trainer_client.adapters.in_double import LibraryInDouble
from tests.trainer_client.runtime.random_steps import worst_difference
from trainer_client.adapters.transformers import trainable
from trainer_client.runtime import GroupPool, linear_loss, run_step

SHAPED = {
    "softcap": Text("Gemma3TextConfig", final_logit_softcapping=0.7, query_pre_attn_scalar=8),
    "scale": Text("CohereConfig", logit_scale=0.25),
    "divisor": Text("GraniteConfig", logits_scaling=3.0),
    "latent attention": Text(
        "DeepseekV2Config",
        num_key_value_heads=4,
        q_lora_rank=12,
        kv_lora_rank=8,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=6,
        n_routed_experts=2,
        n_group=1,
        topk_group=1,
        num_experts_per_tok=1,
        first_k_dense_replace=3,
    ),
}


IN_SINGLE = 1e-6  # what the library computes in float32 is summed in another order in packs
AS_IT_IS = dict.fromkeys(SHAPED, IN_SINGLE) | {"divisor": 1e-10}
PRODUCTS = (torch.ops.aten.mm, torch.ops.aten.addmm)


class MostLogits(TorchDispatchMode):
    """The most rows of any product that is as wide as the vocabulary."""

    rows = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        given = operation(*args, **(kwargs or {}))
        if operation.overloadpacket in PRODUCTS and given.shape[1] == VOCABULARY:
            self.rows = max(self.rows, len(given))
        return given


def step(family, model, samples, seed):
    """Loss and gradients of a step, and the most rows of logits that were held."""
    shard = shard_of(samples, 1, 0, seed, (1,))
    with GroupPool() as pool, MostLogits() as most:
        return run_step(model, shard, pool), most.rows


@pytest.mark.parametrize(
    "name",
    [
        "softcap",
        pytest.param("divisor", marks=pytest.mark.long),
        pytest.param("scale", marks=pytest.mark.long),
        pytest.param("latent attention", marks=pytest.mark.long),
    ],
)
def test_what_a_model_makes_of_its_logits_is_part_of_its_loss(monkeypatch, name):
    monkeypatch.setattr(linear_loss, "CHUNK_BYTES", 3 * VOCABULARY * 8)
    monkeypatch.setitem(FAMILIES, name, SHAPED[name])
    family = FAMILIES[name]
    samples = samples_of(name, family.build(), 1)
    for casts, bound in ((nullcontext(), AS_IT_IS[name]), (LibraryInDouble(), 1e-10)):
        model = trainable(family.build())
        with casts:
            result, rows = step(family, model, samples, 1)
            loss, grads = one_at_a_time(family, family.build(), samples)
        assert worst_difference(result, model.model, loss, grads)[1] <= bound
        assert rows == 3
    assert casts.left_out > 0


def test_casts_of_others_than_the_library_are_made():
    ones = torch.ones(2, dtype=torch.float64)
    with LibraryInDouble() as casts:
        rounded = (ones.float(), ones.to(torch.float32), ones.to(dtype=torch.float32))
    assert {each.dtype for each in rounded} == {torch.float32}
    assert casts.left_out == 0


def test_a_head_that_is_no_plain_linear_layer_is_trained_with_its_logits():
    class Doubled(nn.Linear):
        def forward(self, hidden):
            return super().forward(2 * hidden)

    family = FAMILIES["llama"]
    samples = samples_of("llama", family.build(), 1)

    def doubled():
        model = family.build()
        head = Doubled(*reversed(model.lm_head.weight.shape), bias=False).double()
        head.weight = model.lm_head.weight
        model.set_output_embeddings(head)
        return model

    model = trainable(doubled())
    result, rows = step(family, model, samples, 1)
    loss, grads = one_at_a_time(family, doubled(), samples)
    assert worst_difference(result, model.model, loss, grads)[1] <= 1e-10
    assert rows > 3


def by_a_weight(model, logits):
    """A learned temperature, which is 1 at first."""
    if not hasattr(model, "temperature"):
        model.temperature = nn.Parameter(torch.ones((), dtype=torch.float64))
    return logits * model.temperature


def without_the_last(model, logits):
    """Tokens that are never generated."""
    return logits.index_fill(-1, torch.arange(VOCABULARY - 5, VOCABULARY), -1e4)


@pytest.mark.parametrize(
    "shape",
    [
        lambda model, logits: logits.square(),
        lambda model, logits: logits * (1 + 1e-6),
        by_a_weight,
        without_the_last,
    ],
)
def test_logits_that_a_model_shapes_in_a_way_of_its_own_are_held(caplog, shape):
    family = FAMILIES["llama"]
    samples = samples_of("llama", family.build(), 1)

    def squared():
        model = family.build()
        shape(model, torch.zeros(1, VOCABULARY, dtype=torch.float64))
        forward = model.forward

        def shaped(*arguments, labels=None, **named):
            out = forward(*arguments, **named)
            out.logits = shape(model, out.logits)
            if labels is not None:
                out.loss = model.loss_function(out.logits, labels, VOCABULARY)
            return out

        model.forward = shaped
        return model

    model = trainable(squared())
    with caplog.at_level("INFO", logger="trainer_client"):
        result, _ = step(family, model, samples, 1)
    loss, grads = one_at_a_time(family, squared(), samples)
    assert worst_difference(result, model.model, loss, grads)[1] <= 1e-10
    said = [r.getMessage() for r in caplog.records if "held in memory" in r.getMessage()]
    assert len(said) == 1
    assert "LlamaForCausalLM" in said[0]


def test_what_is_hooked_before_a_head_is_done_once_a_microbatch():
    family = FAMILIES["llama"]
    samples = samples_of("llama", family.build(), 1)

    def halved():
        model = family.build()
        model.lm_head.register_forward_pre_hook(lambda head, given: (given[0] * 0.5,))
        return model

    model = trainable(halved())
    result, _ = step(family, model, samples, 1)
    loss, grads = one_at_a_time(family, halved(), samples)
    assert worst_difference(result, model.model, loss, grads)[1] <= 1e-10


def test_the_first_microbatch_holds_no_logits_either(monkeypatch):
    monkeypatch.setattr(linear_loss, "CHUNK_BYTES", 3 * VOCABULARY * 8)
    family = FAMILIES["qwen3_vl"]
    samples = samples_of("qwen3_vl", family.build(), 1, count=1)
    model = trainable(family.build(), processor=PROCESSOR)
    _, rows = step(family, model, samples, 1)
    assert len(samples[0].ids) > 3
    assert rows == 3
