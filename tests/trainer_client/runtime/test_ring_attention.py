"""Ring attention against torch's own scaled_dot_product_attention."""

import numpy as np
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from tests.trainer_client.runtime.whole_attention import reference, zigzag_rows
from trainer_client.runtime import GroupPool, LayoutError, PackedAttention, ring_attention
from trainer_client.runtime.block_attention import PlainKernel
from trainer_client.runtime.ring_layout import build_ring_layout

WORLD = 7
TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5, torch.bfloat16: 3e-2}


def random_case(seed):
    """A pack, its padding and its tensors, the same on every rank."""
    rng = np.random.default_rng(seed)
    degree = 1 + seed % WORLD
    lengths = rng.integers(1, 40, size=rng.integers(1, 6))
    if seed % 3 == 0:
        lengths[0] = 1
    unit = 2 * degree if degree > 1 else 1
    padded = -(-lengths // unit) * unit
    kv_heads = int(rng.integers(1, 3))
    heads = kv_heads * int(rng.integers(1, 4))
    dtype = [torch.float64, torch.float64, torch.float32, torch.bfloat16][seed // 14 % 4]
    generator = torch.Generator().manual_seed(seed)
    value_dim = 8 if seed % 4 else 5  # as in multi-head latent attention
    widths = {
        "q": (heads, 8),
        "k": (kv_heads, 8),
        "v": (kv_heads, value_dim),
        "g": (heads, value_dim),
    }
    shapes = [(int(padded.sum()), *shape) for shape in widths.values()]
    tensors = [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]
    return degree, lengths, padded, bool(seed // WORLD % 2), dtype, tensors


def relative(found, good):
    """Error against the size of the good values; a gradient that is 0 in truth counts as 1."""
    return float((found.double() - good).norm() / good.norm().clamp_min(1.0))


def ring_cases(rank, size, seeds):
    worst = []
    with GroupPool(timeout_s=60) as pool:
        for seed in seeds:
            degree, lengths, padded, causal, dtype, (q, k, v, grad) = random_case(seed)
            if rank >= degree:
                continue
            group = pool.get(tuple(range(degree)))
            rows = zigzag_rows(padded, degree, rank)
            local = [x[rows].to(dtype).requires_grad_() for x in (q, k, v)]
            cu_seqlens = torch.tensor([0, *np.cumsum(padded)], dtype=torch.int32)
            out = ring_attention(*local, cu_seqlens, group=group, causal=causal, lengths=lengths)
            out.backward(grad[rows].to(dtype))
            worst.append((seed, compare(seed, rows, local, out)))
    return worst


def compare(seed, rows, local, out):
    _, lengths, padded, causal, dtype, (q, k, v, grad) = random_case(seed)
    whole = [x.to(dtype).double().requires_grad_() for x in (q, k, v)]
    expected = reference(*whole, lengths, padded, causal)
    expected.backward(grad.to(dtype).double())
    pairs = [(out, expected), *zip((x.grad for x in local), (x.grad for x in whole), strict=True)]
    return dtype, max(relative(found.detach(), good.detach()[rows]) for found, good in pairs)


def test_ring_attention_equals_torch_attention_at_degrees_1_to_7_causal_and_full(world):
    seeds = list(range(56))
    answers = world(ring_cases, WORLD, seeds)
    assert {seed for answer in answers.values() for seed, _ in answer} == set(seeds)
    for rank, answer in answers.items():
        for seed, (dtype, error) in answer:
            assert error <= TOLERANCE[dtype], (rank, seed, dtype, error)


def test_a_pack_held_alone_needs_no_group():
    q, k, v = (torch.randn(30, 2, 4, dtype=torch.float64) for _ in range(3))
    lengths = np.array([11, 1, 18])
    out = ring_attention(q, k, v, [0, 11, 12, 30], group=None)
    torch.testing.assert_close(out, reference(q, k, v, lengths, lengths, True))


def test_tiles_of_a_long_sequence_agree_with_the_whole(monkeypatch):
    monkeypatch.setattr("trainer_client.runtime.plain_kernel.TILE_ROWS", 7)
    q, k, v = (torch.randn(40, 2, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    attention = PackedAttention([0, 23, 40])
    lengths = np.array([23, 17])
    for causal in (True, False):
        out = attention(q, k, v, causal=causal)
        expected = reference(q, k, v, lengths, lengths, causal)
        torch.testing.assert_close(out, expected)
        found = torch.autograd.grad(out.square().sum(), (q, k, v))
        good = torch.autograd.grad(expected.square().sum(), (q, k, v))
        torch.testing.assert_close(found, good)


def test_the_scale_can_be_given():
    q, k, v = (torch.randn(9, 1, 4, dtype=torch.float64) for _ in range(3))
    out = ring_attention(q, k, v, [0, 9], group=None, causal=False, scale=0.3)
    first = [x.transpose(0, 1)[None] for x in (q, k, v)]
    torch.testing.assert_close(
        out, scaled_dot_product_attention(*first, scale=0.3)[0].transpose(0, 1)
    )


def test_an_empty_pack_gives_an_empty_result():
    q = torch.empty(0, 2, 4, requires_grad=True)
    out = ring_attention(q, q, q, [0], group=None)
    out.sum().backward()
    assert out.shape == (0, 2, 4)


@pytest.mark.parametrize("degree", range(2, 8))
@pytest.mark.parametrize("causal", [True, False])
def test_every_member_computes_the_same_number_of_scores(degree, causal):
    work = set()
    for cp_rank in range(degree):
        layout = build_ring_layout(
            [0, 4 * degree, 10 * degree], degree=degree, cp_rank=cp_rank, causal=causal
        )
        work.add(sum(scores(block) for block in layout.blocks))
    assert len(work) == 1


def scores(block):
    queries, keys = np.diff(block.queries.bounds), np.diff(block.keys.bounds)
    products = queries * (queries + 1) / 2 if block.causal else queries * keys
    return int(products.sum())


def test_one_long_sequence_is_cut_without_gathering_rows():
    for cp_rank in range(3):
        layout = build_ring_layout([0, 60], degree=3, cp_rank=cp_rank, causal=True)
        for block in layout.blocks:
            assert isinstance(block.queries.index, slice)
            assert isinstance(block.keys.index, slice)


def test_lengths_that_zigzag_cannot_cut_are_refused_with_the_multiple_to_pad_to():
    with pytest.raises(LayoutError, match=r"sequence 1 has 10 tokens.*multiple of 6"):
        build_ring_layout([0, 12, 22], degree=3, cp_rank=0, causal=True)


def test_rows_that_do_not_match_the_pack_are_refused():
    q = torch.zeros(5, 2, 4)
    with pytest.raises(LayoutError, match="cu_seqlens of the whole padded pack"):
        ring_attention(q, q, q, [0, 6], group=None)


def test_true_lengths_longer_than_the_padding_are_refused():
    with pytest.raises(LayoutError, match="do not fit the padded lengths"):
        build_ring_layout([0, 4], degree=1, cp_rank=0, causal=False, lengths=[5])


def test_heads_that_cannot_be_shared_are_refused():
    q, k = torch.zeros(4, 3, 4), torch.zeros(4, 2, 4)
    with pytest.raises(LayoutError, match="3 query heads cannot share 2 key heads"):
        ring_attention(q, k, k, [0, 4], group=None)


@pytest.mark.parametrize("wide", [("q", "k"), ("v",), ("q",)])
def test_queries_keys_and_values_of_different_types_are_refused_with_the_cast_to_do(wide):
    q, k, v = (
        torch.zeros(4, 2, 4, dtype=torch.float32 if name in wide else torch.bfloat16)
        for name in "qkv"
    )
    with pytest.raises(
        LayoutError, match=r"attention takes one type.*q\.to\(torch\.bfloat16\)"
    ) as e:
        ring_attention(q, k, v, [0, 4], group=None)
    named = f"q is {q.dtype}, k {k.dtype} and v {v.dtype}"
    assert named in str(e.value)


@pytest.mark.parametrize("dtype", [torch.int32, torch.float8_e4m3fn, torch.complex64])
def test_types_that_are_not_floating_of_16_bits_or_more_are_refused_with_the_cast_to_do(dtype):
    q = torch.zeros(4, 2, 4).to(dtype)
    with pytest.raises(LayoutError, match=rf"are {dtype}, and.*q\.to\(torch\.bfloat16\)"):
        ring_attention(q, q, q, [0, 4], group=None)


def test_half_types_on_a_cpu_use_the_plain_kernel():
    from trainer_client.runtime.block_attention import choose_kernel

    assert isinstance(choose_kernel(torch.zeros(1, 1, 8, dtype=torch.bfloat16)), PlainKernel)
