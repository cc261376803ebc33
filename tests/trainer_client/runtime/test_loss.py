"""Loss by tokens of the global batch, and gradients summed over replicas."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from trainer_client.runtime import (
    GroupPool,
    LayoutError,
    global_loss_tokens,
    sum_gradients,
    token_weighted_loss,
)
from trainer_client.runtime import loss as loss_module


def test_parts_add_up_to_the_mean_over_all_tokens():
    logits, labels = torch.randn(9, 5).double(), torch.tensor([0, 4, -100, 2, 1, -100, 3, 3, 0])
    parts = [token_weighted_loss(logits[p], labels[p], 7) for p in (slice(0, 2), slice(2, 9))]
    torch.testing.assert_close(sum(parts), cross_entropy(logits, labels))


def test_a_part_without_labels_weighs_nothing_but_stays_in_the_graph():
    logits = torch.randn(3, 5, requires_grad=True)
    token_weighted_loss(logits, torch.full((3,), -100), 7).backward()
    assert torch.equal(logits.grad, torch.zeros(3, 5))


def test_a_part_without_rows_stays_in_the_graph():
    logits = torch.randn(0, 5, requires_grad=True)
    loss = token_weighted_loss(logits, torch.empty(0, dtype=torch.int64), 7)
    loss.backward()
    assert loss.item() == 0


def test_a_step_without_any_label_gives_zero():
    assert token_weighted_loss(torch.randn(2, 5), torch.full((2,), -100), 0).item() == 0


def test_half_types_are_summed_in_single_precision():
    logits, labels = torch.randn(300, 5).bfloat16(), torch.zeros(300, dtype=torch.int64)
    loss = token_weighted_loss(logits, labels, 300)
    torch.testing.assert_close(loss, cross_entropy(logits.float(), labels))


def test_logits_that_do_not_match_the_labels_are_refused():
    with pytest.raises(LayoutError, match="one row of logits per local token"):
        token_weighted_loss(torch.zeros(3, 5), torch.zeros(4, dtype=torch.int64), 4)


def test_weights_give_the_weighted_mean_of_all_parts():
    logits, labels = torch.randn(9, 5).double(), torch.tensor([0, 4, -100, 2, 1, -100, 3, 3, 0])
    weights = torch.tensor([0.3, 0.3, 9, 0, 0, 7.5, 7.5, 7.5, 1], dtype=torch.float64)
    total = float(weights[labels != -100].sum())
    each = cross_entropy(logits, labels, reduction="none")
    parts = [
        token_weighted_loss(logits[p], labels[p], total, weights[p])
        for p in (slice(0, 2), slice(2, 9))
    ]
    torch.testing.assert_close(sum(parts), (each * weights).sum() / total)


def test_a_sum_of_weights_below_one_divides_too():
    logits, labels = torch.randn(2, 5).double(), torch.tensor([0, 4])
    weights = torch.full((2,), 0.01, dtype=torch.float64)
    loss = token_weighted_loss(logits, labels, 0.02, weights)
    torch.testing.assert_close(loss, cross_entropy(logits, labels))


def test_rows_of_weight_0_give_nothing_even_where_their_loss_is_infinite():
    logits = torch.tensor([[0.0, -float("inf")], [1.0, 2.0]], requires_grad=True)
    loss = token_weighted_loss(logits, torch.tensor([1, 1]), 2.0, torch.tensor([0.0, 2.0]))
    loss.backward()
    torch.testing.assert_close(loss, cross_entropy(logits[1:], torch.tensor([1])))
    assert torch.equal(logits.grad[0], torch.zeros(2))


def test_a_step_whose_weights_are_all_0_gives_zero():
    loss = token_weighted_loss(torch.randn(2, 5), torch.tensor([1, 2]), 0.0, torch.zeros(2))
    assert loss.item() == 0


def test_weights_that_do_not_match_the_labels_are_refused():
    with pytest.raises(LayoutError, match=r"3 loss weights for 4 labels.*mb\.loss_weights"):
        token_weighted_loss(torch.zeros(4, 5), torch.zeros(4, dtype=torch.int64), 4, torch.ones(3))


class Parts(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.used = torch.nn.Parameter(torch.zeros(3, 2))
        self.used_by_one = torch.nn.Parameter(torch.zeros(5))
        self.unused = torch.nn.Parameter(torch.zeros(2))
        self.other_type = torch.nn.Parameter(torch.zeros(4, dtype=torch.float64))
        self.frozen = torch.nn.Parameter(torch.zeros(2), requires_grad=False)


def gradient_case(rank, size):
    loss_module.BUCKET_BYTES = 30  # several buckets
    module = Parts()
    with GroupPool(timeout_s=60) as pool:
        module.used.grad = torch.full((3, 2), float(rank))
        module.other_type.grad = torch.full((4,), 2.0, dtype=torch.float64)
        if rank == 1:
            module.used_by_one.grad = torch.ones(5)
        sum_gradients(module, pool.everyone)
        tokens = global_loss_tokens(10 + rank, pool.everyone)
    return {name: p.grad for name, p in module.named_parameters()}, tokens


def test_gradients_are_added_and_one_that_nobody_has_stays_none(world):
    for grads, tokens in world(gradient_case, 3).values():
        assert tokens == 33
        assert torch.equal(grads["used"], torch.full((3, 2), 3.0))
        assert torch.equal(grads["used_by_one"], torch.ones(5))
        assert torch.equal(grads["other_type"], torch.full((4,), 6.0, dtype=torch.float64))
        assert grads["unused"] is None
        assert grads["frozen"] is None


def test_without_a_group_the_count_is_the_replicas_own():
    assert global_loss_tokens(5) == 5
