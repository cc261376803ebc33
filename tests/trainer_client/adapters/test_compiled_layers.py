"""Compiled decoder layers of transformers: one graph for all packs, the library's gradients."""

import pytest
import torch
from torch._dynamo import config as compiler_config
from torch._dynamo.utils import counters

from tests.trainer_client.adapters.foreign_models import FAMILIES, PROCESSOR, one_at_a_time
from tests.trainer_client.adapters.foreign_steps import placed, samples_of, shard_of
from tests.trainer_client.runtime.random_steps import make_shard, worst_difference
from trainer_client.adapters.transformers import trainable
from trainer_client.runtime import GroupPool, evaluate_step, run_step

# Torch's compiler looks at the gradients of its inputs, leaves or not.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


def with_compiled_layers(family):
    model = trainable(family.build(), processor=PROCESSOR)
    for layer in model.model.get_decoder().layers:
        layer.compile(fullgraph=True, backend="aot_eager", dynamic=True)
    return model


def compiled_layers(name, seed=1):
    """The largest difference of a step whose layers are compiled, and its microbatches."""
    family = FAMILIES[name]
    samples = samples_of(name, family.build(), seed)
    shard = shard_of(samples, 1, 0, seed, (1,))
    model = with_compiled_layers(family)
    with GroupPool() as pool:
        result = run_step(model, shard, pool)
    loss, grads = one_at_a_time(family, family.build(), samples)
    return worst_difference(result, model.model, loss, grads)[1], len(shard.microbatches)


@pytest.mark.long
def test_the_layers_of_a_decoder_are_one_graph_for_all_microbatches():
    difference, microbatches = compiled_layers("llama")
    assert difference <= 1e-10
    assert microbatches == 4
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "graphs"),
    [
        ("qwen3_vl", 2),  # its last layer passes on no features of deeper encoder layers
        ("gemma3", 3),  # layers with a window and without; a pack without images has no spans
        ("mistral", 1),
    ],
)
def test_layers_with_windows_spans_and_deep_features_compile_too(name, graphs):
    difference, _ = compiled_layers(name)
    assert difference <= 1e-10
    assert counters["stats"]["unique_graphs"] == graphs
    assert not counters["graph_break"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "graphs"), [("qwen3_vl", 4), pytest.param("gemma3", 12, marks=pytest.mark.full)]
)
def test_layers_that_saw_packs_with_images_and_without_compile_for_no_step_again(name, graphs):
    """Not even for an idle wave. The graphs are those that the adapter's README counts."""
    family = FAMILIES[name]
    samples = samples_of(name, family.build(), 1)
    seen = [place for place, sample in enumerate(samples) if sample.items]
    text = [place for place, sample in enumerate(samples) if not sample.items]
    model = with_compiled_layers(family)
    with compiler_config.patch(recompile_limit=16), GroupPool() as pool:
        usual = shard_in(samples, [seen, text])
        run_step(model, usual, pool)
        evaluate_step(model, usual, pool)
        assert counters["stats"]["unique_graphs"] <= graphs
        rare = shard_in(samples, [[place] for place in seen + text] + [[]])
        with torch.compiler.set_stance("fail_on_recompile"):
            run_step(model, rare, pool)
            evaluate_step(model, rare, pool)


def shard_in(samples, packs):
    """The only replica's shard of these packs; it is idle in the wave of an empty one."""
    return placed(samples, make_shard(samples, [[((0,), p)] if p else [] for p in packs], 1, 0, 1))
