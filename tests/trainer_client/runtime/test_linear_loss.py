"""The loss of a linear head without its logits, against torch's cross-entropy of all logits."""

import weakref

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy, linear
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from tests.trainer_client.runtime import random_steps
from tests.trainer_client.runtime.random_steps import (
    Model,
    make_model,
    make_shard,
    random_plan,
    random_samples,
    single_process,
    weighed,
    worst_difference,
)
from trainer_client.runtime import (
    GroupPool,
    LayoutError,
    LinearLogits,
    evaluate_step,
    linear_cross_entropy,
    linear_loss,
    run_step,
)

ROWS, WIDTH, WORDS = 23, 6, 17


def case(seed, dtype=torch.float64, weighs=False):
    """Hidden states, a head with bias, labels of which some are missing, and loss weights."""
    generator = torch.Generator().manual_seed(seed)
    hidden, weight, bias = (
        torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for shape in ((ROWS, WIDTH), (WORDS, WIDTH), (WORDS,))
    )
    labels = torch.randint(0, WORDS, (ROWS,), generator=generator)
    labels[torch.rand(ROWS, generator=generator) < 0.3] = -100
    weights = torch.rand(ROWS, generator=generator).round(decimals=1) if weighs else None
    return hidden, weight, bias, labels, weights


def whole(hidden, weight, bias, labels, weights=None, scale=1.0, softcap=None):
    logits = linear(hidden, weight, bias) * scale
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    if logits.dtype != torch.float64:
        logits = logits.float()
    each = cross_entropy(logits, labels, reduction="none")
    return (each if weights is None else each * weights.to(each.dtype)).sum()


def with_gradients(loss, tensors):
    return [loss.detach(), *torch.autograd.grad(3 * loss, tensors)]


def worst(found, good):
    pairs = zip(found, good, strict=True)
    return max(float((a.double() - b).norm() / b.double().norm()) for a, b in pairs)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(linear_loss, "CHUNK_BYTES", 5 * WORDS * 8)  # five rows of fp64


@pytest.mark.parametrize("shaping", [{}, {"softcap": 1.5}, {"scale": 0.3}])
@pytest.mark.parametrize("weighs", [False, True])
@pytest.mark.parametrize("on_host", [True, False])
def test_loss_and_gradients_are_those_of_all_logits(monkeypatch, shaping, weighs, on_host):
    if not on_host:  # as if labels lay on a device, where unlabelled rows are not looked for
        monkeypatch.setattr(torch.Tensor, "nonzero", None)
        monkeypatch.setattr(linear_loss, "HOST", torch.device("cuda"))
    hidden, weight, bias, labels, weights = case(1, weighs=weighs)
    found = linear_cross_entropy(hidden, weight, labels, weights, bias=bias, **shaping)
    good = whole(hidden, weight, bias, labels, weights, **shaping)
    tensors = (hidden, weight, bias)
    assert worst(with_gradients(found, tensors), with_gradients(good, tensors)) <= 1e-12


def test_half_precision_is_reduced_in_single_precision():
    hidden, weight, bias, labels, _ = case(2, torch.bfloat16)
    found = linear_cross_entropy(hidden, weight, labels, bias=bias)
    assert found.dtype == torch.float32
    good = whole(hidden, weight, bias, labels)
    torch.testing.assert_close(found, good)
    grads = torch.autograd.grad(found, (hidden, weight, bias))
    assert [grad.dtype for grad in grads] == [torch.bfloat16] * 3
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight, bias)]
    truth = torch.autograd.grad(whole(*exact, labels), exact)
    assert worst(grads, truth) < 1e-2


def test_autocast_computes_logits_in_its_type():
    hidden, weight, bias, labels, _ = case(3, torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = linear_cross_entropy(hidden, weight, labels, bias=bias)
        good = whole(hidden, weight, bias, labels)
    torch.testing.assert_close(found, good)
    grads = torch.autograd.grad(found, (hidden, weight, bias))
    expected = torch.autograd.grad(good, (hidden, weight, bias))
    assert [grad.dtype for grad in grads] == [torch.float32] * 3
    assert worst(grads, expected) < 2e-2


@pytest.mark.parametrize("rows", [0, 4])
def test_rows_without_any_label_stay_in_the_graph(rows):
    hidden, weight, *_ = case(4)
    loss = linear_cross_entropy(hidden[:rows], weight, torch.full((rows,), -100))
    loss.backward()
    assert loss == 0
    assert torch.equal(weight.grad, torch.zeros_like(weight))


def test_rows_of_weight_0_give_nothing_even_where_their_loss_is_infinite():
    hidden = torch.ones(2, 1, dtype=torch.float64, requires_grad=True)
    weight = torch.tensor([[1.0], [2.0]], dtype=torch.float64)
    bias = torch.tensor([0.0, -torch.inf], dtype=torch.float64)
    labels, weights = torch.tensor([1, 0]), torch.tensor([0.0, 2.0])
    loss = linear_cross_entropy(hidden, weight, labels, weights, bias=bias)
    loss.backward()
    assert loss == 0  # the second row has no other word
    assert torch.equal(hidden.grad, torch.zeros(2, 1))


def test_gradients_that_nobody_asks_for_are_not_made():
    hidden, weight, _, labels, _ = case(5)
    frozen = weight.detach()
    (grad,) = torch.autograd.grad(linear_cross_entropy(hidden, frozen, labels), hidden)
    assert worst([grad], torch.autograd.grad(whole(hidden, frozen, None, labels), hidden)) <= 1e-12
    hidden, weight = torch.randn(ROWS, 200), torch.randn(WORDS, 200, requires_grad=True)
    with LiveBytes() as training:
        linear_cross_entropy(hidden, weight, labels)
    with torch.no_grad(), LiveBytes() as evaluating:
        assert not linear_cross_entropy(hidden, weight, labels).requires_grad
    assert evaluating.peak <= training.peak - weight.nbytes


def test_a_second_backward_pass_is_refused():
    hidden, weight, _, labels, _ = case(6)
    loss = linear_cross_entropy(hidden, weight, labels)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


class LiveBytes(TorchDispatchMode):
    """Bytes of the tensors that were made within and still live: now, and at most."""

    def __init__(self):
        super().__init__()
        self.now, self.peak, self._known = 0, 0, set()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        given = operation(*args, **(kwargs or {}))
        for tensor in tree_iter(given):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor.untyped_storage())
        return given

    def _count(self, storage):
        address, size = storage.data_ptr(), storage.nbytes()
        if address in self._known or not size:
            return
        self._known.add(address)
        self.now += size
        self.peak = max(self.peak, self.now)

        def forget():
            self._known.discard(address)
            self.now -= size

        weakref.finalize(storage, forget)


def test_memory_does_not_grow_with_rows_times_words(monkeypatch):
    rows, words, width = 512, 2048, 4
    monkeypatch.setattr(linear_loss, "CHUNK_BYTES", 8 * words * 4)  # eight rows of fp32
    hidden, weight = torch.randn(rows, width, requires_grad=True), torch.randn(words, width)
    labels = torch.randint(0, words, (rows,))

    def bytes_a_logit(loss_of):
        with LiveBytes() as live:
            loss_of().backward()
        return live.peak / (rows * words)

    held = bytes_a_logit(lambda: whole(hidden, weight, None, labels))
    chunked = bytes_a_logit(lambda: linear_cross_entropy(hidden, weight, labels))
    assert held >= 8  # logits and their softmax, at the least
    assert chunked < 0.25
    assert chunked * rows * words < 3 * linear_loss.CHUNK_BYTES + 4 * hidden.nbytes


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"labels": torch.zeros(4, dtype=torch.int64)}, "one row per local token"),
        ({"weights": torch.ones(4)}, "4 loss weights for 23 labels"),
        ({"weight": torch.zeros(WORDS, WIDTH)}, r"cast one of them, such as hidden\.to"),
    ],
)
def test_rows_labels_and_weights_that_do_not_fit_are_refused(change, said):
    hidden, weight, _, labels, _ = case(7)
    with pytest.raises(LayoutError, match=said):
        linear_cross_entropy(**{"hidden": hidden, "weight": weight, "labels": labels, **change})


# Whole steps.


class Headless(Model):
    """Gives the loss of its logits in three ways: by its head, by a weight, or summed itself."""

    way = "head"

    def decoder(self, x, position_ids, attention):
        x = x + self.places(position_ids)
        for layer in self.layers:
            x = layer(x, attention)
        return x

    def decode(self, microbatch, features, attention):
        hidden = super().decode(microbatch, features, attention)
        if self.way == "head":
            return LinearLogits(hidden=hidden, head=self.head)
        if self.way == "weight":
            ones = hidden.new_ones(len(hidden), 1)
            biased = torch.cat([self.head.weight, self.head.bias[:, None]], dim=1)
            return LinearLogits(hidden=torch.cat([hidden, ones], dim=1), head=biased)
        return LinearLogits(hidden=hidden, head=self.head).loss_sum(microbatch)


def headless(way, how):
    torch.manual_seed(7)
    model = Headless().double()
    model.way = way
    if how == "ddp":
        return nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    if how.startswith("fsdp"):
        parts = [*model.encoders.values(), *model.layers]
        for part in [*parts, model.head] if "head" in how else parts:
            fully_shard(part)
        return fully_shard(model)
    return model


def steps(rank, size, cases):
    linear_loss.CHUNK_BYTES = 7 * 13 * 8
    answer = {}
    with GroupPool(timeout_s=60) as pool:
        for way, how, seed in cases:
            samples = random_samples(seed)
            if seed % 2:
                samples = weighed(samples, seed)
            waves = random_plan(samples, size, (1, 2), seed)
            shard = make_shard(samples, waves, size, rank, seed)
            model = headless(way, how)
            evaluated = evaluate_step(model, shard, pool)
            result = run_step(model, shard, pool)
            assert evaluated.loss == pytest.approx(result.loss, rel=1e-12)
            found = random_steps.whole(model) if how != "plain" else model
            loss, grads = single_process(make_model(()), samples)
            answer[way, how] = worst_difference(result, found, loss, grads)
    return answer


def test_steps_without_logits_train_as_a_single_process_does(world):
    cases = [(way, "plain", 11) for way in ("head", "weight", "own")]
    cases += [("weight", "ddp", 12), ("head", "fsdp", 13), ("weight", "fsdp", 14)]
    cases += [("head", "fsdp with its head", 15)]
    for answer in world(steps, 2, cases).values():
        for case_, (parameter, difference) in answer.items():
            assert difference <= 1e-10, (case_, parameter, difference)


def sharded_weight(rank, size):
    samples = random_samples(11)
    shard = make_shard(samples, random_plan(samples, size, (1,), 11), size, rank, 11)
    model = headless("weight", "plain")
    decode = model.decode

    def outside(microbatch, features, attention):
        given = decode(microbatch, features, attention)
        return LinearLogits(hidden=given.hidden[:, :-1], head=model.head.weight)

    model.decode = outside
    for part in (*model.encoders.values(), *model.layers, model.head, model):
        fully_shard(part)
    with GroupPool(timeout_s=60) as pool:
        try:
            run_step(model, shard, pool)
        except LayoutError as error:
            return str(error)


def test_a_weight_that_is_sharded_where_the_loss_is_taken_is_refused(world):
    for said in world(sharded_weight, 2).values():
        assert "give LinearLogits the head's module" in said


def test_a_head_with_a_forward_of_its_own_is_refused():
    class Scaled(nn.Linear):
        def forward(self, hidden):
            return 2 * super().forward(hidden)

    model = headless("head", "plain")
    model.head = Scaled(8, 13).double()
    samples = random_samples(11)
    shard = make_shard(samples, random_plan(samples, 1, (1,), 11), 1, 0, 11)
    with GroupPool() as pool, pytest.raises(LayoutError, match="Scaled with a forward of its own"):
        run_step(model, shard, pool)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's, of its own functions
@pytest.mark.parametrize("weighs", [pytest.param(False, marks=pytest.mark.full), True])
def test_the_loss_of_labels_on_the_host_is_one_graph_that_gives_the_same(weighs):
    torch.compiler.reset()
    compiled = torch.compile(
        linear_cross_entropy, fullgraph=True, dynamic=True, backend="aot_eager"
    )
    for number, rows in enumerate([ROWS, ROWS - 1]):  # five chunks each
        hidden, weight, bias, labels, weights = case(number, weighs=weighs)
        # Cut ones are no views, whose whole a compiler looks at too.
        hidden = hidden.detach()[:rows].clone().requires_grad_()
        leaves = hidden, weight, bias
        given = [each[:rows].clone() for each in (labels, weights) if each is not None]
        with torch.compiler.set_stance("fail_on_recompile" if number else "default"):
            found = compiled(hidden, weight, *given, bias=bias)
        good = with_gradients(whole(hidden, weight, bias, *given), leaves)
        assert worst(with_gradients(found, leaves), good) <= 1e-10
    torch.compiler.reset()
