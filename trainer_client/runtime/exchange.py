"""Sends encoded feature rows from the replica that encoded them to the one that needs them.

There is one all-to-all per modality and wave, with the plan's splits; its backward is the same
exchange in the other direction.

Every replica of the group takes part in every exchange and in its backward, even without rows.
The exchange is part of the graph where nothing was encoded (an anchor stands for the missing
gradient) and where nothing arrives (an empty tensor still links it to the loss). Otherwise one
replica's backward would wait for another that never comes. Where a wave has several exchanges,
``after=`` chains them, so that autograd runs their backward in the same order on all replicas.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from trainer_client.runtime.faults import LayoutError
from trainer_client.runtime.peers import PeerGroup, Transfer

FEATURES_CHANNEL = 3


class Arriving:
    """Feature rows on their way. Whoever computes with them calls ``wait`` first.

    rows: [sum(recv_splits), ...], in the order of their sources; filled once they were waited for.
    """

    def __init__(self, rows: Tensor, transfer: Transfer) -> None:
        self.rows = rows
        self._transfer = transfer

    def wait(self) -> Tensor:
        """The rows. Raises PeerError where a member died or hung."""
        with torch.no_grad():  # a transport may copy them into place
            self._transfer.wait()
        return self.rows


def exchange_features(
    features: Tensor,
    send_splits: Sequence[int],
    recv_splits: Sequence[int],
    group: PeerGroup,
    *,
    after: Tensor | None = None,
    differentiable: bool = True,
) -> Tensor:
    """Send rows to every member and receive rows from every member: ``start_exchange``, waited
    for."""
    started = start_exchange(
        features, send_splits, recv_splits, group, after=after, differentiable=differentiable
    )
    return started.wait()


def start_exchange(
    features: Tensor,
    send_splits: Sequence[int],
    recv_splits: Sequence[int],
    group: PeerGroup,
    *,
    after: Tensor | None = None,
    differentiable: bool = True,
) -> Arriving:
    """Start to send rows to every member and to receive rows from every member.

    Parameters
    ----------
    features: [sum(send_splits), ...], this replica's rows in the order of their destinations.
        The trailing shape and type are the same on all members.
    send_splits, recv_splits: rows to and from each member.
    after: the rows of the wave's previous exchange, arrived or not.
    differentiable: False for a frozen encoder, on all members alike: no backward exchange.

    Raises
    ------
    LayoutError: splits do not match the group or the rows.
    PeerError: a member died or hung.
    """
    _check_splits(features, send_splits, recv_splits, group)
    if not (differentiable and torch.is_grad_enabled()):
        rows, transfer = _start(features.detach(), send_splits, recv_splits, group, "forward")
        return Arriving(rows, transfer)
    anchor = torch.zeros(0, requires_grad=True, device=features.device)
    posted: list[Transfer] = []
    rows = _Exchange.apply(  # type: ignore[no-untyped-call]
        features, anchor, after, list(send_splits), list(recv_splits), group, posted
    )
    return Arriving(rows, *posted)


def scatter_rows(embeddings: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
    """A copy of ``embeddings`` [tokens, width] with ``rows`` [R, width] at ``positions`` [R].

    Even without rows the result is linked to ``rows`` in the graph, as the exchange that gave them
    needs it.

    Raises LayoutError where the numbers of rows and positions differ.
    """
    if rows.shape[0] != positions.shape[0]:
        raise LayoutError(
            f"{rows.shape[0]} feature rows arrived for {positions.shape[0]} token positions; "
            "the encoder's output does not match the plan's lengths, so check that the trainer "
            "uses the processor the index was made with"
        )
    return embeddings.index_copy(0, positions.to(embeddings.device), rows.to(embeddings.dtype))


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        features: Tensor,
        anchor: Tensor,
        after: Tensor | None,
        send_splits: list[int],
        recv_splits: list[int],
        group: PeerGroup,
        posted: list[Transfer],
    ) -> Tensor:
        ctx.send_splits, ctx.recv_splits, ctx.group = send_splits, recv_splits, group
        rows, transfer = _start(features, send_splits, recv_splits, group, "forward")
        posted.append(transfer)
        return rows

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_rows: Tensor) -> tuple[Tensor | None, ...]:
        grad, transfer = _start(grad_rows, ctx.recv_splits, ctx.send_splits, ctx.group, "backward")
        transfer.wait()  # nothing but the encoder's backward pass is left to do
        return grad, None, None, None, None, None, None


def _check_splits(
    features: Tensor, send_splits: Sequence[int], recv_splits: Sequence[int], group: PeerGroup
) -> None:
    if len(send_splits) != group.size or len(recv_splits) != group.size:
        raise LayoutError(
            f"{len(send_splits)} send and {len(recv_splits)} receive splits were given for a "
            f"group of {group.size}; give one number of rows for every member"
        )
    if sum(send_splits) != features.shape[0] or min(*send_splits, *recv_splits, 0) < 0:
        raise LayoutError(
            f"send splits {list(send_splits)} (receive {list(recv_splits)}) do not add up to the "
            f"{features.shape[0]} feature rows at hand; select the rows by the plan's send order"
        )


def _start(
    rows: Tensor,
    send_splits: Sequence[int],
    recv_splits: Sequence[int],
    group: PeerGroup,
    direction: str,
) -> tuple[Tensor, Transfer]:
    """The rows to be received, and the sends and receives between pairs of members; a pair without
    rows sends nothing.

    Used instead of the backends' own all-to-all for three reasons: most pairs are empty when
    placement is good, a failure names the peer, and gloo's all-to-all lacks types such as bf16.
    """
    rows = rows.contiguous()
    received = rows.new_empty((sum(recv_splits), *rows.shape[1:]))
    outgoing = _split(rows, send_splits)
    incoming = _split(received, recv_splits)
    me = group.index
    others = [peer for peer in range(group.size) if peer != me]
    transfer = group.post(
        [(outgoing[peer], peer) for peer in others],
        [(incoming[peer], peer) for peer in others],
        action=f"the feature exchange ({direction})",
        channel=FEATURES_CHANNEL,
    )
    if incoming[me].shape != outgoing[me].shape:
        raise LayoutError(
            f"replica {group.replica} keeps {outgoing[me].shape[0]} rows for itself but expects "
            f"{incoming[me].shape[0]}; send and receive splits come from different plans"
        )
    incoming[me].copy_(outgoing[me])
    return received, transfer


def _split(rows: Tensor, splits: Sequence[int]) -> list[Tensor]:
    starts = accumulate(splits, initial=0)
    return [rows.narrow(0, start, count) for start, count in zip(starts, splits, strict=False)]
