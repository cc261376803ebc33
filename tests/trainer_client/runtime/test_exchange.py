"""Features travel to where they are needed, and their gradients travel back."""

import numpy as np
import pytest
import torch

from trainer_client.runtime import GroupPool, LayoutError, PeerGroup, exchange_features
from trainer_client.runtime import scatter_rows as place

WIDTH = 3


def traffic(seed, size):
    """Rows from every source to every destination; some replicas encode or need nothing."""
    rng = np.random.default_rng(seed)
    rows = rng.integers(0, 4, size=(size, size))
    rows[seed % size] = 0
    rows[:, (seed + 1) % size] = 0
    return rows


def whole_features(seed, rows):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(int(n), WIDTH, generator=generator).double() for n in rows.sum(axis=1)]


def exchange_cases(rank, size, seeds):
    with GroupPool(timeout_s=60) as pool:
        return [one_exchange(seed, rank, size, pool.everyone) for seed in seeds] + [
            two_modalities(rank, size, pool.everyone),
            frozen(rank, size, pool.everyone),
        ]


def one_exchange(seed, rank, size, group):
    rows = traffic(seed, size)
    features = whole_features(seed, rows)[rank].requires_grad_()
    received = exchange_features(features, rows[rank].tolist(), rows[:, rank].tolist(), group)
    weight = float(rank + 1)
    (received.square() * weight).sum().backward()
    return received.detach(), features.grad


def two_modalities(rank, size, group):
    """Rank 0 encodes only vision and gets only audio; its backward still meets the others'."""
    vision = torch.zeros(size, size, dtype=torch.int64)
    vision[0, 1:] = 1
    audio = vision.T.contiguous()
    model = torch.nn.Linear(WIDTH, WIDTH).double()
    embeddings = torch.zeros(4, WIDTH, dtype=torch.float64)
    previous = None
    for splits in (vision, audio):
        count = int(splits[rank].sum())
        inputs = torch.ones(count, WIDTH, dtype=torch.float64)
        features = model(inputs) if count else inputs.new_empty(0, WIDTH)
        rows = exchange_features(
            features, splits[rank].tolist(), splits[:, rank].tolist(), group, after=previous
        )
        embeddings = place(embeddings, rows, torch.arange(len(rows)))
        previous = rows
    embeddings.sum().backward()
    return model.bias.grad


def frozen(rank, size, group):
    """No backward exchange: a replica that goes backward alone is not waited for."""
    splits = [1] * size
    rows = exchange_features(
        torch.full((size, WIDTH), float(rank)), splits, splits, group, differentiable=False
    )
    weight = torch.ones(WIDTH, requires_grad=True)
    if rank == 0:
        (rows * weight).sum().backward()
    return rows[:, 0]


def test_rows_arrive_by_source_and_gradients_return(world):
    size, seeds = 4, list(range(6))
    answers = world(exchange_cases, size, seeds)
    for number, seed in enumerate(seeds):
        rows = traffic(seed, size)
        sent = [f.split(rows[r].tolist()) for r, f in enumerate(whole_features(seed, rows))]
        for rank, answer in answers.items():
            received, grad = answer[number]
            assert torch.equal(received, torch.cat([source[rank] for source in sent]))
            expected = [2 * (to + 1) * part for to, part in enumerate(sent[rank])]
            torch.testing.assert_close(grad, torch.cat(expected))
    for rank, answer in answers.items():
        assert torch.equal(answer[-2], torch.full((WIDTH,), 3.0 if rank == 0 else 1.0).double())
        assert torch.equal(answer[-1], torch.arange(4.0))


def test_one_replica_exchanges_with_itself():
    alone = PeerGroup((0,), index=0)
    features = torch.randn(3, WIDTH, requires_grad=True)
    assert torch.equal(exchange_features(features, [3], [3], alone), features)


@pytest.mark.parametrize(
    ("send", "receive", "message"),
    [
        ([2], [2], "do not add up to the 3 feature rows"),
        ([3, 0], [3], "2 send and 1 receive splits"),
        ([3], [2], "come from different plans"),
    ],
)
def test_splits_that_do_not_match_are_refused(send, receive, message):
    with pytest.raises(LayoutError, match=message):
        exchange_features(torch.zeros(3, WIDTH), send, receive, PeerGroup((0,), index=0))


def test_rows_replace_embeddings_and_take_their_gradient():
    embeddings = torch.zeros(4, WIDTH, requires_grad=True)
    rows = torch.ones(2, WIDTH, requires_grad=True)
    placed = place(embeddings, rows, torch.tensor([3, 1]))
    placed.sum().backward()
    assert placed[:, 0].tolist() == [0, 1, 0, 1]
    assert embeddings.grad[:, 0].tolist() == [1, 0, 1, 0]
    assert rows.grad.tolist() == [[1] * WIDTH] * 2


def test_no_rows_at_all_still_link_to_what_sent_them():
    rows = torch.ones(0, WIDTH, requires_grad=True)
    place(torch.zeros(4, WIDTH), rows, torch.empty(0, dtype=torch.int64)).sum().backward()
    assert rows.grad is not None


def test_more_rows_than_positions_are_refused():
    with pytest.raises(LayoutError, match="2 feature rows arrived for 1 token positions"):
        place(torch.zeros(4, WIDTH), torch.zeros(2, WIDTH), torch.tensor([0]))
