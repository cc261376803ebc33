"""The path through torch's flash operators, without a GPU: their schemas are real, their shapes
are worked out on fake CUDA tensors, and a plain implementation stands in for their kernels."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import library as operators
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.trainer_client.runtime.whole_attention import reference, zigzag_rows
from trainer_client.runtime import (
    GroupPool,
    LayoutError,
    PackedAttention,
    SlowAttention,
    block_attention,
    ring_operator,
)
from trainer_client.runtime.block_attention import (
    Asked,
    FlashKernel,
    KernelChoice,
    PlainKernel,
    choose_kernel,
    kernel_for,
)
from trainer_client.runtime.ring_layout import Block, Rows

HEADS, KV_HEADS, DIM = 4, 2, 16


GPU = Asked(device_type="cuda", dtype=torch.bfloat16, head_dim=128)
NO_FLASH = "this torch was built without"
NO_TRITON = "triton is not installed"


def kernel_of(device, dtype, dim, **settings):
    return type(choose_kernel(torch.empty(8, HEADS, dim, dtype=dtype, device=device), **settings))


@pytest.mark.parametrize(
    ("change", "reason", "remedy"),
    [
        ({"dtype": torch.float32}, "queries are torch.float32", "train in bfloat16"),
        ({"dtype": torch.float64}, "queries are torch.float64", "train in bfloat16"),
        ({"head_dim": 512}, "head_dim is 512", "narrower ones"),
        ({"lacking_flash": NO_FLASH}, "built without", "take a torch built with"),
        ({"spans": True, "lacking_flex": NO_TRITON}, NO_TRITON, "install the triton"),
        ({"spans": True, "head_dim": 8}, "head_dim is 8", "wider heads"),
    ],
)
def test_a_gpu_that_goes_without_flash_is_told_why_and_what_to_do(change, reason, remedy):
    choice = kernel_for(replace(GPU, **change))
    assert choice.kernel == "plain"
    assert reason in choice.reason
    assert remedy in choice.remedy


@pytest.mark.parametrize(
    ("change", "kernel"),
    [
        ({}, "flash"),
        ({"dtype": torch.float16, "head_dim": 8}, "flash"),
        ({"head_dim": 100}, "flash"),
        ({"spans": True}, "flex"),
        ({"spans": True, "dtype": torch.float32}, "flex"),
        ({"device_type": "cpu"}, "plain"),
        ({"device_type": "cpu", "dtype": torch.float32, "spans": True}, "plain"),
    ],
)
def test_the_fastest_kernel_that_computes_it_needs_no_reason(change, kernel):
    assert kernel_for(replace(GPU, **change)) == KernelChoice(kernel=kernel)


@pytest.mark.parametrize(
    ("wanted", "change", "said"),
    [
        ("flash", {"dtype": torch.float32}, r"'flash' cannot.*torch\.float32.*train in bfloat16"),
        ("flash", {"device_type": "cpu"}, "are on the cpu.*move the model to a GPU"),
        ("flash", {"spans": True}, 'see what lies ahead.*kernel="flex"'),
        ("flash", {"lacking_flash": NO_FLASH}, NO_FLASH),
        ("flash2", {"flash": "FA3"}, r"is FA3 in this process.*restore_flash_attention_impl\(\)"),
        ("flash3", {}, r'is FA2 in this process.*activate_flash_attention_impl\("FA3"\)'),
        ("flash3", {"flash": "FA3", "head_dim": 512}, "head_dim is 512"),
        ("flash3", {"flash": "FA3", "lacking_flash": "FA3 takes"}, "FA3 takes.*go back to Flash"),
        ("flex", {"lacking_flex": NO_TRITON}, NO_TRITON),
        ("flex", {"device_type": "cpu"}, "no backward.*move the model to a GPU"),
        ("fastest", {}, "kernel='fastest'; it is one of auto, flash, flash2, flash3, flex"),
    ],
)
def test_a_kernel_that_is_demanded_and_cannot_is_an_error_with_the_reason(wanted, change, said):
    with pytest.raises(LayoutError, match=said):
        kernel_for(replace(GPU, **change), wanted)


@pytest.mark.parametrize("wanted", ["flash", "flex", "plain"])
def test_a_kernel_that_is_demanded_and_can_is_taken(wanted):
    assert kernel_for(GPU, wanted) == KernelChoice(kernel=wanted)


@pytest.mark.parametrize(("wanted", "active"), [("flash2", "FA2"), ("flash3", "FA3")])
def test_a_version_of_flash_that_is_demanded_and_active_is_flash(wanted, active):
    assert kernel_for(replace(GPU, flash=active), wanted) == KernelChoice(kernel="flash")


def test_the_version_that_torch_has_active_is_the_one_that_is_asked_about(monkeypatch, caplog):
    asked = []
    monkeypatch.setattr(block_attention, "current_flash_attention_impl", lambda: "FA3")
    monkeypatch.setattr(block_attention, "lacking_flash", lambda *of: asked.append(of[1]) or "")
    block_attention.note_kernel.cache_clear()
    with FakeTensorMode(), caplog.at_level("INFO", logger="trainer_client"):
        assert kernel_of("cuda", torch.bfloat16, 128, wanted="flash3") is FlashKernel
        with pytest.raises(LayoutError, match="is FA3 in this process"):
            kernel_of("cuda", torch.bfloat16, 128, wanted="flash2")
    assert asked == ["FA3", "FA3"]
    assert "kernel flash (FA3)" in caplog.text
    block_attention.note_kernel.cache_clear()


def test_torch_itself_refuses_a_flash_attention_that_is_not_installed():
    before = torch.nn.attention.current_flash_attention_impl()
    with pytest.raises(ModuleNotFoundError, match="flash_attn_interface"):
        torch.nn.attention.activate_flash_attention_impl("FA3")
    assert torch.nn.attention.current_flash_attention_impl() == before


def test_a_layer_may_demand_its_kernel():
    q = torch.zeros(4, 2, 8)
    with pytest.raises(LayoutError, match="'flash' cannot compute"):
        PackedAttention([0, 4])(q, q, q, kernel="flash")


def test_flash_is_chosen_for_half_precision_on_a_gpu_that_has_it(monkeypatch, caplog):
    monkeypatch.setattr(block_attention, "lacking_flash", lambda *_: "")
    block_attention.note_kernel.cache_clear()
    with FakeTensorMode(), caplog.at_level("INFO", logger="trainer_client"):
        for dtype in (torch.bfloat16, torch.float16):
            assert kernel_of("cuda", dtype, 128) is FlashKernel
            assert kernel_of("cuda", dtype, 128) is FlashKernel
            assert kernel_of("cpu", dtype, 128) is PlainKernel
    assert [record.getMessage() for record in caplog.records] == [
        "attention of torch.bfloat16 heads of 128: kernel flash (FA2)",
        "attention of torch.float16 heads of 128: kernel flash (FA2)",
    ]


def test_the_slow_path_on_a_gpu_is_told_once_for_each_reason(monkeypatch, caplog):
    monkeypatch.setattr(block_attention, "lacking_flash", lambda *_: "")
    block_attention.tell_slow.cache_clear()
    cases = [("cuda", torch.float32, 128), ("cuda", torch.bfloat16, 512), ("cpu", torch.half, 512)]
    with FakeTensorMode(), pytest.warns(SlowAttention) as told:
        kernels = [kernel_of(*case) for case in cases * 3]
    assert set(kernels) == {PlainKernel}
    block_attention.tell_slow.cache_clear()
    assert len(told) == 2
    assert "queries are torch.float32" in str(told[0].message)
    assert "train in bfloat16" in str(told[0].message)
    assert "head_dim is 512" in str(told[1].message)
    warned = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warned == [str(w.message) for w in told]


@pytest.mark.parametrize(
    ("built", "capability", "flash", "lacking"),
    [
        (False, (9, 0), "FA2", "this torch was built without flash attention"),
        (True, (7, 5), "FA2", "the GPU has compute capability 7.5"),
        (True, (8, 0), "FA2", ""),
        (True, (10, 0), "FA2", ""),
        (True, (9, 0), "FA3", ""),
        (True, (8, 0), "FA3", "FA3 is active in torch, which takes 9.0, and the GPU has compute "
                              "capability 8.0"),
        (True, (10, 0), "FA4", ""),
        (True, (12, 0), "FA4", "FA4 is active in torch, which takes 9.0 or 10.0, and the GPU has "
                               "compute capability 12.0"),
    ],
)  # fmt: skip
def test_an_old_gpu_and_a_torch_without_flash_are_told_apart(
    monkeypatch, built, capability, flash, lacking
):
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: built)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert block_attention.lacking_flash.__wrapped__(torch.device("cuda", 1), flash) == lacking


def rows(bounds, device):
    return Rows(
        index=slice(0, bounds[-1]),
        bounds=bounds,
        cu_seqlens=torch.tensor(bounds, dtype=torch.int32, device=device),
    )


def test_the_operators_take_the_arguments_and_give_what_the_ring_merges():
    with FakeTensorMode():
        q, grad = (torch.empty(20, HEADS, DIM, dtype=torch.bfloat16, device="cuda") for _ in "qg")
        k, v = (torch.empty(40, KV_HEADS, DIM, dtype=torch.bfloat16, device="cuda") for _ in "kv")
        block = Block(queries=rows((0, 5, 20), "cuda"), keys=rows((0, 10, 40), "cuda"),
                      causal=False)  # fmt: skip
        out, lse = FlashKernel().forward(q, k, v, block, 0.25)
        assert (out.shape, out.dtype) == (q.shape, q.dtype)
        assert (lse.shape, lse.dtype) == ((HEADS, 20), torch.float32)
        grads = FlashKernel().backward(grad, q, k, v, out, lse, block, 0.25)
        assert [found.shape for found in grads] == [q.shape, k.shape, v.shape]


# A stand-in for the kernels, written per sequence and in fp32.


def sequences(cum_q, cum_k):
    bounds = zip(cum_q.tolist(), cum_q.tolist()[1:], cum_k.tolist(), cum_k.tolist()[1:],
                 strict=False)  # fmt: skip
    return [(slice(a, b), slice(c, d)) for a, b, c, d in bounds]


def checked(tensors, cum_q, cum_k, max_q, max_k, dropout):
    assert all(t.is_contiguous() and t.dtype == torch.bfloat16 for t in tensors)
    assert {t.shape[2] for t in tensors} in ({DIM}, {2 * DIM})
    assert cum_q.dtype == cum_k.dtype == torch.int32
    assert (max_q, max_k) == (int(cum_q.diff().max()), int(cum_k.diff().max()))
    assert dropout == 0.0


def scores_of(q, k, causal, scale, before=None):
    """[heads, queries, keys], float32; ``before``: the keys of a window before a query's own."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    scores = torch.einsum("qhd,khd->hqk", q.float(), k.float()) * scale
    if causal:
        ones = torch.ones(scores.shape[1:], dtype=torch.bool)
        hidden = ones.triu(1) if before is None else ones.triu(1) | ones.tril(-before - 1)
        scores.masked_fill_(hidden, float("-inf"))
    return scores


def forward(
    q, k, v, cum_q, cum_k, max_q, max_k, dropout, causal, debug, *, scale,
    window_size_left=None, **_,
):  # fmt: skip
    checked((q, k, v), cum_q, cum_k, max_q, max_k, dropout)
    out, lse = torch.empty_like(q), torch.empty(q.shape[1], q.shape[0])
    for mine, theirs in sequences(cum_q, cum_k):
        scores = scores_of(q[mine], k[theirs], causal, scale, window_size_left)
        lse[:, mine] = scores.logsumexp(dim=-1)
        spread = v[theirs].repeat_interleave(q.shape[1] // k.shape[1], dim=1).float()
        out[mine] = torch.einsum("hqk,khd->qhd", scores.softmax(dim=-1), spread).to(out.dtype)
    none = torch.empty(0)
    return out, lse, torch.zeros(2, dtype=torch.uint64), torch.zeros((), dtype=torch.uint64), none


def backward(
    grad, q, k, v, out, lse, cum_q, cum_k, max_q, max_k, dropout, causal, rng, unused, *, scale,
    window_size_left=None, **_,
):  # fmt: skip
    checked((grad, q, k, v, out), cum_q, cum_k, max_q, max_k, dropout)
    assert lse.is_contiguous()
    assert lse.dtype == torch.float32
    group = q.shape[1] // k.shape[1]
    grads = [torch.zeros(t.shape) for t in (q, k, v)]
    delta = (grad.float() * out.float()).sum(-1).T
    for mine, theirs in sequences(cum_q, cum_k):
        scores = scores_of(q[mine], k[theirs], causal, scale, window_size_left)
        weights = (scores - lse[:, mine, None]).exp()
        spread = v[theirs].repeat_interleave(group, dim=1).float()
        of_weights = torch.einsum("qhd,khd->hqk", grad[mine].float(), spread)
        of_scores = weights * (of_weights - delta[:, mine, None]) * scale
        keys = k[theirs].repeat_interleave(group, dim=1).float()
        grads[0][mine] = torch.einsum("hqk,khd->qhd", of_scores, keys)
        for target, found in (
            (1, torch.einsum("hqk,qhd->khd", of_scores, q[mine].float())),
            (2, torch.einsum("hqk,qhd->khd", weights, grad[mine].float())),
        ):
            grads[target][theirs] = found.unflatten(1, (-1, group)).sum(2)
    return tuple(found.to(q.dtype) for found in grads)


def through_flash(rank, size, seeds):
    """Largest difference of output and gradients, relative to their size, by degree and mask. Of
    every other case, values are narrower than queries."""
    operators.impl("aten::_flash_attention_forward", "CPU", forward)
    operators.impl("aten::_flash_attention_backward", "CPU", backward)
    ring_operator.choose_kernel = lambda q, v, **_: FlashKernel()
    answer = {}
    with GroupPool(timeout_s=60) as pool:
        for seed in seeds:
            rng = np.random.default_rng(seed)
            degree, causal = 1 + seed % size, bool(seed // size % 2)
            lengths = rng.integers(1, 60, size=3)
            unit = 2 * degree if degree > 1 else 1
            padded, cut = -(-lengths // unit) * unit, bool(seed // (2 * size))
            lengths = lengths if cut else padded
            if rank < degree:
                answer[degree, causal, cut] = against_dense(
                    pool.get(tuple(range(degree))), seed, lengths, padded, causal
                )
        if rank == 0:
            answer["window"] = against_dense(None, 0, np.array([40, 7]), np.array([41, 7]), True, 9)
    return answer


def against_dense(group, seed, lengths, padded, causal, window=None):
    generator = torch.Generator().manual_seed(seed)
    total = int(padded.sum())
    whole = [
        torch.randn(total, heads, width, generator=generator).bfloat16()
        for heads, width in zip(
            (HEADS, KV_HEADS, KV_HEADS, HEADS),
            (*2 * [DIM], *2 * [DIM - 5 * (seed % 2)]),
            strict=True,
        )
    ]
    mine = torch.arange(total) if group is None else zigzag_rows(padded, group.size, group.index)
    q, k, v = (tensor[mine].requires_grad_() for tensor in whole[:3])
    attention = PackedAttention([0, *np.cumsum(padded)], group=group, lengths=lengths.tolist())
    out = attention(q, k, v, causal=causal, window=window)
    out.backward(whole[3][mine])
    dense = [tensor.double().requires_grad_() for tensor in whole[:3]]
    expected = reference(*dense, lengths, padded, causal, window=window)
    expected.backward(whole[3].double())
    pairs = zip((out, q.grad, k.grad, v.grad), (expected, *(t.grad for t in dense)), strict=True)
    with torch.no_grad():
        return max(float((a - b[mine]).norm() / b[mine].norm()) for a, b in pairs)


def test_a_ring_of_flash_blocks_equals_dense_attention(world):
    answers = world(through_flash, 3, list(range(12)))
    assert len(answers[0]) == 13
    for answer in answers.values():
        for case, difference in answer.items():
            assert difference < 2e-2, case
