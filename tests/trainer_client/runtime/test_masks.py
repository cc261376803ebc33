"""Windows and spans of a pack that one replica holds, by every kernel that computes them."""

from functools import partial

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention import flex_attention

from tests.trainer_client.runtime.whole_attention import reference
from trainer_client.runtime import LayoutError, PackedAttention, PeerGroup, ring_operator
from trainer_client.runtime.block_attention import FlexKernel, PlainKernel
from trainer_client.runtime.ring_layout import build_ring_layout

LENGTHS, PADDED = np.array([23, 1, 17, 6]), np.array([24, 1, 20, 6])
ROWS = int(PADDED.sum())
UNFUSED = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


@pytest.fixture
def kernel(request, monkeypatch):
    """A kernel as a layer demands it. Flex attention runs unfused here, and torch closes its
    backward pass to users on a CPU, since only the fused one lacks it."""
    if request.param == "plain":
        return "plain"
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *tensors: None)
    monkeypatch.setattr(ring_operator, "choose_kernel", lambda *asked, **_: FlexKernel())
    return "flex"


COMPILES = pytest.param("flex", marks=pytest.mark.long)  # anew for every kind of mask
KERNELS = pytest.mark.parametrize("kernel", ["plain", COMPILES], indirect=True)


def random_spans(seed):
    """Spans of some rows, also such as lie across the border of two sequences."""
    rng = np.random.default_rng(seed)
    numbers = np.repeat(np.arange(ROWS), rng.integers(1, 6, ROWS))[:ROWS]
    return torch.from_numpy(np.where(rng.random(ROWS)[numbers] < 0.6, numbers, -1))


def difference(kernel, *, window=None, spans=None, causal=True, width=8):
    """The largest, of output and gradients, to torch's own attention over whole masks."""
    generator = torch.Generator().manual_seed(4)
    q, k, v, grad = (
        torch.randn(ROWS, heads, dim, generator=generator, dtype=torch.float64)
        for heads, dim in ((4, 8), (2, 8), (2, width), (4, width))
    )
    leaves = [x.requires_grad_() for x in (q, k, v)]
    attention = PackedAttention([0, *np.cumsum(PADDED)], lengths=LENGTHS.tolist())
    out = attention(q, k, v, causal=causal, window=window, spans=spans, kernel=kernel)
    good = reference(q, k, v, LENGTHS, PADDED, causal, window, spans)
    found = (out, *torch.autograd.grad(out, leaves, grad))
    expected = (good, *torch.autograd.grad(good, leaves, grad))
    pairs = zip(found, expected, strict=True)
    with torch.no_grad():
        return max(float((a - b).norm() / b.norm().clamp_min(1e-3)) for a, b in pairs)


@UNFUSED
@KERNELS
@pytest.mark.parametrize("window", [None, 1, 5, 22, 23, 100])
@pytest.mark.parametrize("spanned", [False, True])
def test_windows_and_spans_are_those_of_the_whole_mask(monkeypatch, kernel, window, spanned):
    monkeypatch.setattr("trainer_client.runtime.plain_kernel.TILE_ROWS", 7)
    spans = random_spans(window or 0) if spanned else None
    assert difference(kernel, window=window, spans=spans) <= 1e-10


@UNFUSED
@KERNELS
@pytest.mark.parametrize("causal", [True, False])
def test_values_may_be_narrower_or_wider_than_queries(kernel, causal):
    for width in (4, 8, 16):
        assert difference(kernel, causal=causal, width=width) <= 1e-10


@UNFUSED
@pytest.mark.parametrize("kernel", ["flex"], indirect=True)
def test_flex_attention_computes_a_window_over_spans(kernel):
    assert difference(kernel, window=5, spans=random_spans(5), width=4) <= 1e-10


def block_of(lengths, *, window=None, spans=None):
    """The one block of a pack that a replica holds."""
    bounds = [0, *np.cumsum(lengths)]
    settings = {"degree": 1, "cp_rank": 0, "causal": True, "window": window, "spans": spans}
    return build_ring_layout(bounds, **settings).blocks[0]


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own
def test_compiled_flex_attention_makes_no_graph_for_a_new_pack(monkeypatch):
    """Both passes as torch's compiler takes them in, run by its eager backend: inductor compiles
    flex attention on CPUs without log-sum-exp and gradients only."""
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *tensors: None)
    counter = CompileCounterWithBackend("aot_eager")
    kernel, plain = FlexKernel(partial(torch.compile, dynamic=True, backend=counter)), PlainKernel()
    generator, graphs = torch.Generator().manual_seed(1), []
    for lengths in ((24, 8, 20), (7, 30), (50, 3, 3, 9), (64, 40)):
        rows = sum(lengths)
        spans = torch.full((rows,), -1)
        spans[3:9] = 0
        q, k, v, grad = (
            torch.randn(rows, heads, 16, generator=generator, dtype=torch.float64)
            for heads in (4, 2, 2, 4)
        )
        for mask in ({"spans": spans}, {"window": 5}, {}):
            block = block_of(lengths, **mask)
            found, good = (each.forward(q, k, v, block, 0.25) for each in (kernel, plain))
            found += kernel.backward(grad, q, k, v, *found, block, 0.25)
            good += plain.backward(grad, q, k, v, *good, block, 0.25)
            for one, other in zip(found, good, strict=True):
                assert float((one - other).norm() / other.norm()) <= 1e-10
        graphs.append(counter.frame_count)
    assert graphs[0] > 0
    assert set(graphs) == {graphs[0]}, "all were made for the first pack"


def test_spans_of_a_padded_pack_are_taken_where_they_are():
    there = torch.device("meta")
    made = build_ring_layout(
        [0, 8, 16], degree=1, cp_rank=0, causal=True, lengths=[5, 8], device=there,
        spans=torch.zeros(16, dtype=torch.int64, device=there),
    )  # fmt: skip
    (block,) = made.blocks
    assert block.spans.device == block.queries.index.device == there
    assert len(block.spans) == 13


def test_spans_that_another_pack_had_at_the_same_place_are_not_mixed_up():
    attention = PackedAttention([0, 6])
    q = torch.randn(6, 1, 4, dtype=torch.float64)
    for end in (2, 4, 6):
        spans = torch.full((6,), -1)
        spans[1:end] = 0
        good = reference(q, q, q, np.array([6]), np.array([6]), True, None, spans)
        torch.testing.assert_close(attention(q, q, q, spans=spans), good)
        del spans


def test_windows_and_spans_in_a_cp_group_are_refused_with_the_degree_to_plan():
    spread = {"degree": 2, "cp_rank": 0, "causal": True}
    with pytest.raises(LayoutError, match=r"window of 6 tokens.* longest sample has 8.*degree: 1"):
        build_ring_layout([0, 8, 16], **spread, window=6)
    with pytest.raises(LayoutError, match=r"bidirectional spans.*static_degree: 1"):
        build_ring_layout([0, 8, 16], **spread, spans=torch.zeros(8, dtype=torch.int64))
    assert build_ring_layout([0, 8, 16], **spread, lengths=[7, 5], window=7).degree == 2


@pytest.mark.parametrize(
    ("mask", "said"),
    [
        ({"window": 3, "causal": False}, "not causal"),
        ({"window": 0}, "a query sees itself"),
        ({"spans": torch.zeros(5, dtype=torch.int64)}, r"\(5,\) must be one number for each of 6"),
    ],
)
def test_masks_that_make_no_sense_are_refused(mask, said):
    q = torch.zeros(6, 1, 4)
    with pytest.raises(LayoutError, match=said):
        PackedAttention([0, 6], group=PeerGroup((0,), index=0))(q, q, q, **mask)
