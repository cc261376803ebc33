"""Attention as an operator: compiled into one graph for all packs, and named by checkpoints."""

import gc
from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import distributed as dist
from torch import library, nn
from torch.fx.experimental import _config as shape_config
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from demo.model import DecoderBlock, ModelConfig, rotary_angles
from tests.trainer_client.runtime.random_steps import (
    make_model,
    make_shard,
    one_token,
    random_plan,
    random_samples,
    single_process,
    worst_difference,
)
from tests.trainer_client.runtime.whole_attention import zigzag_rows
from trainer_client.runtime import (
    GroupPool,
    LayoutError,
    PackedAttention,
    RuntimeFault,
    evaluate_step,
    run_step,
)
from trainer_client.runtime.ring_operator import bound_packs

CONFIG = ModelConfig(width=32, heads=4, kv_heads=2)
OPERATOR = torch.ops.dataservice.packed_attention.default
EAGER = pytest.param("aot_eager")
QUIET = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's, of its own functions
INDUCTOR = pytest.param("inductor", marks=[pytest.mark.long, QUIET])


def decoder_block():
    torch.manual_seed(1)
    return DecoderBlock(CONFIG).double()


def inputs(rows, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, CONFIG.width, generator=generator, dtype=torch.float64)
    angles = rotary_angles(torch.arange(rows)[:, None], CONFIG.width // CONFIG.heads, x.dtype)
    return x.requires_grad_(), angles


def gradients(block, x, out):
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    return torch.autograd.grad((out * weights).sum(), (x, *block.parameters()))


def worst(found, good):
    pairs = zip(found, good, strict=True)
    return max(float((a - b).detach().norm() / b.detach().norm().clamp_min(1e-3)) for a, b in pairs)


def compiled_without_recompiling(block, backend="aot_eager"):
    """The block in one graph, which must hold for every later call."""
    compiled = torch.compile(block, fullgraph=True, backend=backend, dynamic=True)

    def call(*arguments, first):
        if first:
            return compiled(*arguments)
        with torch.compiler.set_stance("fail_on_recompile"):
            return compiled(*arguments)

    return call


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.parametrize("backend", [EAGER, INDUCTOR])
def test_a_decoder_block_is_one_graph_for_packs_of_all_lengths(backend):
    block = decoder_block()
    compiled = compiled_without_recompiling(block, backend)
    packs = [[0, 9, 14], [0, 23], [0, 4, 5, 31], [0, 8, 16, 17]]
    held = []
    for number, cu_seqlens in enumerate(packs):
        x, angles = inputs(cu_seqlens[-1], number)
        lengths = [stop - start for start, stop in pairwise(cu_seqlens)]
        lengths[-1] -= 1  # the last row is padding
        attention = PackedAttention(cu_seqlens, lengths=lengths)
        out = compiled(x, angles, attention, first=number == 0)
        held.append((x, angles, cu_seqlens, lengths, out))
    for x, angles, cu_seqlens, lengths, out in reversed(held):  # as in a pipeline
        expected = block(x, angles, PackedAttention(cu_seqlens, lengths=lengths))
        good = (expected, *gradients(block, x, expected))
        assert worst((out, *gradients(block, x, out)), good) <= 1e-10


@pytest.mark.parametrize("rows", [CONFIG.width, 2 * CONFIG.width, CONFIG.width // CONFIG.heads])
def test_a_first_pack_with_as_many_rows_as_the_model_is_wide_makes_the_graph_of_all(rows):
    compiled = compiled_without_recompiling(decoder_block())
    with shape_config.patch(use_duck_shape=False):
        for number, length in enumerate([rows, 14, 2, CONFIG.width]):
            x, angles = inputs(length, number)
            compiled(x, angles, PackedAttention([0, length]), first=number == 0).sum().backward()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # the compiler reads it
def test_layers_that_trained_and_evaluated_compile_for_no_step_again():
    samples = [*random_samples(12)[:4], one_token(12)]
    usual = make_shard(samples[:4], [[((0,), [0, 1])], [((0,), [2, 3])]], 1, 0, 12)
    rare = make_shard(samples, [[((0,), [0, 1, 2, 3])], [], [((0,), [4])]], 1, 0, 12)
    assert rare.microbatches[1].idle
    assert rare.microbatches[2].local_tokens == 1
    model = make_model(())
    for layer in model.layers:
        layer.compile(fullgraph=True, backend="aot_eager", dynamic=True)
    with GroupPool() as pool:
        run_step(model, usual, pool)
        evaluate_step(model, usual, pool)
        model.zero_grad()
        with torch.compiler.set_stance("fail_on_recompile"):
            result = run_step(model, rare, pool)
            assert evaluate_step(model, rare, pool).loss == result.loss
    loss, grads = single_process(make_model(()), samples)
    assert worst_difference(result, model, loss, grads)[1] <= 1e-10


def compiled_ring(rank, size):
    """Largest difference to eager, over packs of two groups, each the same members in turn."""
    block, differences = decoder_block(), []
    compiled = compiled_without_recompiling(block)
    with GroupPool(timeout_s=60) as pool:
        for number, (members, padded) in enumerate(
            [((0, 1), (8, 12)), ((1, 0), (24,)), ((0, 1), (4, 4, 16))]
        ):
            group = pool.get(members)
            whole, _ = inputs(sum(padded), number)
            mine = zigzag_rows(padded, 2, group.index)
            x = whole.detach()[mine].requires_grad_()
            angles = rotary_angles(mine[:, None], CONFIG.width // CONFIG.heads, x.dtype)
            cu_seqlens = torch.tensor([0, *padded]).cumsum(0)
            answers = []
            for layer in (partial(compiled, first=number == 0), block):
                out = layer(x, angles, PackedAttention(cu_seqlens, group=group))
                answers.append((out, *gradients(block, x, out)))
            differences.append(worst(*answers))
    return differences


@pytest.mark.long
def test_a_ring_of_two_ranks_is_the_same_graph_for_every_group(world):
    for differences in world(compiled_ring, 2).values():
        assert max(differences) <= 1e-10


def test_a_compiled_block_that_recomputes_attends_to_its_own_microbatch():
    block = decoder_block()
    block.recompute = "full"
    compiled = compiled_without_recompiling(block)
    calls = []
    for number, cu_seqlens in enumerate([[0, 9, 14], [0, 3, 11]]):
        x, angles = inputs(cu_seqlens[-1], number)
        attention = PackedAttention(cu_seqlens)
        calls.append((x, angles, attention, compiled(x, angles, attention, first=number == 0)))
    for x, angles, attention, out in calls:
        good = gradients(block, x, block(x, angles, attention))
        assert worst(gradients(block, x, out), good) <= 1e-10


def kept_attention(context, operation, *arguments, **settings):
    keeps = operation == OPERATOR
    return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize(("policy", "calls"), [(None, 2), (kept_attention, 1)])
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_selective_checkpoint_that_names_the_ring_does_not_go_round_again(
    policy, calls, compiled
):
    block = decoder_block()
    x, angles = inputs(14, 3)
    attention = PackedAttention([0, 9, 14])
    good = gradients(block, x, block(x, angles, PackedAttention([0, 9, 14])))
    options = {}
    if policy is not None:
        options["context_fn"] = partial(create_selective_checkpoint_contexts, policy)

    def layer(x, angles, attention):
        return checkpoint(block, x, angles, attention, use_reentrant=False, **options)

    if compiled:
        layer = torch.compile(layer, fullgraph=True, backend="aot_eager")
    out = layer(x, angles, attention)
    assert attention.calls == 1
    found = gradients(block, x, out)
    assert attention.calls == calls
    assert worst(found, good) <= 1e-10


@pytest.mark.parametrize("compiled", [False, True])
def test_packs_are_forgotten_with_their_last_backward_pass(compiled):
    before = bound_packs()
    project = nn.Linear(4, 4)

    def layer(x, attention):
        q = project(x).unflatten(1, (2, 2))
        return attention(q, q, q)

    if compiled:
        layer = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
    waiting = []
    for number in range(1000 if not compiled else 50):
        attention = PackedAttention([0, 3, 5 + number % 3])
        waiting.append(layer(torch.ones(5 + number % 3, 4), attention).sum())
        del attention
        if len(waiting) == 4:
            waiting.pop(0).backward()
    gc.collect()
    assert bound_packs() == before + 3, "those whose backward pass is to come"
    sum(waiting).backward()
    waiting.clear()
    gc.collect()
    assert bound_packs() == before


def test_tensors_that_are_moved_away_until_the_backward_pass_find_their_pack():
    block = decoder_block()
    x, angles = inputs(14, 5)
    good = gradients(block, x, block(x, angles, PackedAttention([0, 9, 14])))
    copies = torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone)
    with copies:
        out = block(x, angles, PackedAttention([0, 9, 14]))
    gc.collect()
    assert worst(gradients(block, x, out), good) <= 1e-10


def test_a_pack_that_is_gone_is_an_error_that_says_what_to_keep():
    handle = PackedAttention([0, 4]).handle.clone()
    q = torch.zeros(4, 2, 2)
    with pytest.raises(LayoutError, match="Keep the PackedAttention"):
        torch.ops.dataservice.packed_attention(q, q, q, handle, True, 1.0, None, None, "auto")


def test_the_operator_holds_to_what_it_declares():
    q, k, v = (torch.randn(7, 2, 4, dtype=torch.float64, requires_grad=True) for _ in "qkv")
    attention = PackedAttention([0, 3, 7])
    spans = torch.tensor([-1, 0, 0, 1, 1, -1, 2])
    settings = (attention.handle, True, 0.5, 2, spans, "auto")
    library.opcheck(OPERATOR, (q, k, v, *settings))


@pytest.fixture
def alone():
    """A process group of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def compiled_in_place(model):
    model.compile(backend="eager")
    return model


@pytest.mark.parametrize("step", [run_step, evaluate_step])
@pytest.mark.parametrize(
    "wrap",
    [
        lambda model: torch.compile(model, backend="eager"),
        compiled_in_place,
        lambda model: DistributedDataParallel(torch.compile(model, backend="eager")),
        lambda model: torch.compile(DistributedDataParallel(model), backend="eager"),
        lambda model: compiled_in_place(DistributedDataParallel(model)),
    ],
)
def test_a_model_that_is_compiled_as_a_whole_is_refused_with_what_compiles(alone, wrap, step):
    samples = random_samples(1)
    shard = make_shard(samples, random_plan(samples, 1, (1,), 1), 1, 0, 1)
    model = wrap(make_model(()))
    with GroupPool() as pool, pytest.raises(RuntimeFault, match=r"as a whole.*layer\.compile\("):
        step(model, shard, pool)
