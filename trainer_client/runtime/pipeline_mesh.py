"""A rank's place in a pipeline, and its messages to the stages before and after it.

    rank = (replica · stages + stage) · tensor_ranks + tensor rank

               stage 0        stage 1
    replica 0  rank 0  ─F──▶  rank 1      a row: activations and gradients, microbatch by
                  │    ◀──B─     │        microbatch, between the stages of one replica
    replica 1  rank 2  ─F──▶  rank 3      a column: rings, feature exchanges and sums, between
                       ◀──B─              the replicas of one stage (``groups``)

Contract
--------
Shapes: a message is [local tokens, width] in one type. Both sides read the rows from the
microbatch, so stages never negotiate; a message without rows (an idle replica) is not sent.
Order: every pair of sender and receiver has one channel for activations and one for
gradients. Both sides walk through the same schedule, which was checked to take messages of a
channel in the order in which they are sent.
Deadlock: a send never blocks the sender; its buffer is kept until the receiver is known to
have taken it, because something it sent afterwards has arrived. A receive is posted one
action ahead and awaited just before its own. All replicas walk through the same schedule, so the
ranks of a column meet in the same collectives in the same order. Take the actions in the order in
which the schedule was found runnable: each one can begin when those before it are done, because
its own stage is free, its message was sent, and its column has arrived.
Failure: if a rank dies or hangs, every other rank ends with a PeerError within the timeout and a
grace period. The replicas or stages that the error names may be ranks that only waited; a note in
it says which rank went silent first, found by following which peer each rank waited for.

Communicators
-------------
All are made and warmed up with the mesh, on all ranks in this order, and none later:

    the column    one, for rings, exchanges and sums, shared as ``communicator.py`` says
    the row       one, for sums, a tied weight, and what encoders that run by themselves hand on
                  (``encoder_messages.py`` says why that cannot deadlock)
    channels      one for each neighbour and way: activations in and out, gradients in and out; so
                  at most four, and with two stages of one chunk two

The channels are apart because a receive that is posted ahead would hold up, on one communicator,
what is sent after it: an activation of a long microbatch the gradient of a short one, and stages
that were planned to compute would wait. With NCCL each has a stream of its own.

Between two steps
-----------------
What the stages of a replica share of a step once its seconds are known is deferred to the start of
the next one, where all ranks are at the same place (``defer``). It may not go before the next use
of the row, as the replicas' seconds go before the next use of a column. Between steps a tied weight
is added up by two stages of the row, and gradients are clipped over all ranks:

    stages that share the weight   seconds of the row, the weight, the norm over all ranks
    a stage between them           the norm over all ranks; in the next step, seconds of the row

The first wait in the row for the others, which wait for them in the norm: they would deadlock
(``tests/trainer_client/runtime/test_pipeline_waits.py`` shows both).
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore

from trainer_client.runtime.encoder_cut import EncoderCut
from trainer_client.runtime.fault_board import FaultBoard, grace_s
from trainer_client.runtime.faults import LayoutError, PeerError
from trainer_client.runtime.group_pool import GroupPool
from trainer_client.runtime.peers import PeerGroup, Transfer
from trainer_client.runtime.pipeline_schedule import BACKWARD, FORWARD, Action, PipelineSchedule
from trainer_client.runtime.roster import agree
from trainer_client.runtime.stage_layout import EncoderStage


def place_in_mesh(rank: int, *, stages: int, tensor_ranks: int = 1) -> tuple[int, int, int]:
    """(replica, stage, tensor rank) of a rank."""
    replica, inside = divmod(rank, stages * tensor_ranks)
    return replica, *divmod(inside, tensor_ranks)


class PipelineMesh:
    """This rank's row and column. Making one is collective over all ranks.

    Parameters
    ----------
    stages, tensor_ranks: pipeline and tensor parallel sizes, as in the job's topology.
    virtual_stages: model chunks a stage, for interleaved 1F1B.
    encoder_stage: as in the job's topology; where encoders are "spread", all stages read inputs.
    encoder_cut: where they are "cut", which chunk has which layers: a layout's ``encoder_cut``.
    rank, world_size: from ``torch.distributed`` when not given.
    timeout_s: of ``groups``, the column's pool; see ``GroupPool``.
    lane: a name that keeps meshes of one job apart.

    Attributes: ``replica``, ``replicas``, ``stage``, ``stages``, ``tensor_rank``, ``encoder_cut``;
    ``groups``: CP groups among this stage of all replicas, ``column``; ``row``: the replica's
    stages.

    Raises LayoutError where the world cannot be divided, encoders are cut nowhere, or ranks give
    other stages, virtual stages, tensor ranks or places of encoders; GroupFormationError where a
    rank does not come; TransportMismatchError where ranks would communicate in different ways.
    """

    def __init__(
        self,
        *,
        stages: int,
        virtual_stages: int = 1,
        tensor_ranks: int = 1,
        encoder_stage: EncoderStage = "first",
        encoder_cut: EncoderCut | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        timeout_s: float = 600.0,
        lane: str = "",
    ) -> None:
        ready = dist.is_initialized()
        world = world_size or (dist.get_world_size() if ready else 1)
        place = rank if rank is not None else (dist.get_rank() if ready else 0)
        per_replica = stages * tensor_ranks
        if per_replica < 1 or world % per_replica or not 0 <= place < world:
            raise LayoutError(
                f"rank {place} of {world} cannot stand in replicas of {stages} stages × "
                f"{tensor_ranks} tensor ranks; start a multiple of {per_replica} ranks"
            )
        if (encoder_stage == "cut") != (encoder_cut is not None):
            raise LayoutError(
                f"encoder_stage is {encoder_stage!r} and encoder_cut is "
                f"{'None' if encoder_cut is None else 'given'}; encoders that are cut need both: "
                "give the layout's encoder_stage and encoder_cut"
            )
        self.encoder_cut = encoder_cut
        self.stages = stages
        self.virtual_stages = virtual_stages
        self.tensor_ranks = tensor_ranks
        self.replicas = world // per_replica
        self.replica, self.stage, self.tensor_rank = place_in_mesh(
            place, stages=stages, tensor_ranks=tensor_ranks
        )
        store, self._board = None, None
        if world > 1 and ready:
            store = PrefixStore("rows", dist.distributed_c10d._get_default_store())
            self._board = FaultBoard(PrefixStore(f"{lane}/faults", store), replica=place)
            made = store.add(f"{lane}/meshes of/{place}", 1)
            agree(
                PrefixStore(f"{lane}/mesh {made}/", store),
                {
                    "stages": stages,
                    "virtual_stages": virtual_stages,
                    "tensor_ranks": tensor_ranks,
                    "encoder_stage": encoder_stage,
                    "encoder_cut": encoder_cut,
                },
                rank=place,
                ranks=world,
                timeout_s=timeout_s,
            )
        self.groups = GroupPool(
            timeout_s=timeout_s,
            replica=self.replica,
            replicas=self.replicas,
            lane=f"{lane}/stage {self.stage}.{self.tensor_rank}",
        )
        self._encodes = encoder_stage == "spread" or self.stage == 0
        if encoder_cut is not None:
            self._encodes = encoder_cut.reads_inputs(self.stage, stages)
        self._ways = {
            kind: GroupPool(
                timeout_s=timeout_s,
                store=store,
                replica=self.stage,
                replicas=self.stages,
                lane=f"{lane}/row {self.replica}.{self.tensor_rank} {kind}",
            )
            for kind in (FORWARD, BACKWARD)
        }
        self._deferred: list[Callable[[], object]] = []
        with self.naming_ranks():
            self._connect()

    def _connect(self) -> None:
        """Make all communicators, in an order that all ranks share."""
        self.column: PeerGroup = self.groups.everyone
        with self.naming_stages():
            self.row: PeerGroup = self._ways[FORWARD].everyone
            self._channels = {
                (kind, *pair): self._ways[kind].apart(pair) for kind, *pair in self._own_channels()
            }

    @property
    def parts(self) -> tuple[str, ...]:
        """What this stage reads of its microbatches: ``ShardDataset(..., parts=mesh.parts)``."""
        return ("inputs",) * self._encodes + ("labels",) * (self.stage == self.stages - 1)

    @property
    def embedding_stage(self) -> int:
        """The stage that exchanges features and embeds: of the decoder's first chunk."""
        return 0 if self.encoder_cut is None else self.encoder_cut.decoder_chunk % self.stages

    def channel(self, kind: str, sender: int, receiver: int) -> PeerGroup:
        """The group of two that carries one kind of message one way; the sender is first."""
        return self._channels[kind, sender, receiver]

    @property
    def communicators(self) -> int:
        """How many this rank has made: all with the mesh, but those of ``groups.apart``."""
        return sum(pool.communicators for pool in self._pools())

    def defer(self, work: Callable[[], object]) -> None:
        """Do this at the start of the next step, or when the mesh is closed. All stages defer the
        same: a collective may be in it."""
        self._deferred.append(work)

    def catch_up(self) -> None:
        """Do what was deferred."""
        while self._deferred:
            self._deferred.pop(0)()

    def rank_at(self, replica: int, stage: int) -> int:
        """The rank at this replica and stage that has this rank's tensor rank."""
        return (replica * self.stages + stage) * self.tensor_ranks + self.tensor_rank

    @contextmanager
    def naming_stages(self) -> Iterator[None]:
        """Add to errors of the body that their numbers are stages of one replica."""
        try:
            yield
        except PeerError as error:
            error.add_note(
                f"The numbers above are pipeline stages of replica {self.replica}, not replicas."
            )
            raise

    @contextmanager
    def naming_ranks(self) -> Iterator[None]:
        """Add to errors of the body which rank of the whole mesh went silent first."""
        try:
            yield
        except PeerError as error:
            in_row = bool(getattr(error, "__notes__", []))
            suspects = [
                self.rank_at(self.replica, culprit) if in_row else self.rank_at(culprit, self.stage)
                for culprit in error.culprits
            ]
            silent = ", ".join(map(self._described, self._follow(suspects, error.timeout_s)))
            if silent:
                error.add_note(f"By the notes of all ranks, this went silent first: {silent}.")
            raise

    def _follow(self, suspects: list[int], timeout_s: float) -> Sequence[int]:
        """Follow the notes from the ranks that this one waited for to those that wrote none."""
        awaited = suspects[0] if suspects else None
        if self._board is None:
            return suspects
        try:
            self._board.report(awaited)
            if awaited is None:
                return ()
            found = self._board.culprits((), awaited, grace_s=grace_s(timeout_s))
        except RuntimeError:  # the store's host is gone as well
            return suspects
        return found or suspects

    def _described(self, rank: int) -> str:
        replica, stage, _ = place_in_mesh(rank, stages=self.stages, tensor_ranks=self.tensor_ranks)
        return f"rank {rank} (replica {replica}, stage {stage})"

    def close(self) -> None:
        """Drop every group. Call it on all ranks after their last use of the mesh."""
        self.catch_up()
        for pool in self._pools():
            pool.close()

    def _pools(self) -> tuple[GroupPool, ...]:
        return (self.groups, *self._ways.values())

    def __enter__(self) -> "PipelineMesh":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
            return
        self._deferred.clear()  # others may be at another place
        for pool in self._pools():
            pool.drop()

    def _own_channels(self) -> list[tuple[str, int, int]]:
        """The channels that this stage is in, in an order that all stages share, so that
        connecting them one after the other cannot deadlock."""
        last = self.stages if self.virtual_stages > 1 else self.stages - 1
        pairs = [(stage, (stage + 1) % self.stages) for stage in range(last)]
        every = [(FORWARD, *pair) for pair in pairs] + [(BACKWARD, b, a) for a, b in pairs]
        return [each for each in every if self.stage in each[1:]]


class StageLinks:
    """One step's messages of one stage, as its schedule orders them; see the contract."""

    def __init__(
        self,
        mesh: PipelineMesh,
        schedule: PipelineSchedule,
        rows: list[int],
        like: Tensor,
    ) -> None:
        """``rows[m]``: local tokens of microbatch m. ``like`` [0, width]: messages' width, type
        and device."""
        self._mesh = mesh
        self._schedule = schedule
        self._rows = rows
        self._like = like
        # Where each action stands in its stage's list: what a stage has done when it sends.
        self._place = [
            {action: place for place, action in enumerate(actions)} for actions in schedule.actions
        ]
        self._sent: dict[tuple[int, str], deque[tuple[int, Transfer]]] = {}

    def post_receive(self, action: Action) -> tuple[Tensor, Transfer] | None:
        """Start receiving the message that this action takes in; None if it takes in none."""
        source = self._schedule.source(self._mesh.stage, action)
        if source is None:
            return None
        arriving = self._like.new_empty((self._rows[action.microbatch], self._like.shape[1]))
        channel = self._mesh.channel(action.kind, source[0], self._mesh.stage)
        with self._mesh.naming_stages():
            transfer = channel.post([], [(arriving, 0)], action=f"taking in {action}")
        return arriving, transfer

    def receive(self, action: Action, posted: tuple[Tensor, Transfer]) -> Tensor:
        """Wait for it: [rows, width]. Raises PeerError."""
        arriving, transfer = posted
        with self._mesh.naming_stages():
            transfer.wait()
        source = self._schedule.source(self._mesh.stage, action)
        assert source is not None, "posted, so there is a source"
        if arriving.numel():  # an empty message says nothing about its sender
            self._free(source[0], self._place[source[0]][source[1]])
        return arriving

    def send(self, action: Action, tensor: Tensor) -> None:
        """Start sending this action's output, if another stage needs it."""
        target = self._schedule.target(self._mesh.stage, action)
        if target is None:
            return
        stage, taken_by = target
        channel = self._mesh.channel(action.kind, self._mesh.stage, stage)
        with self._mesh.naming_stages():
            transfer = channel.post([(tensor.contiguous(), 1)], [], action=f"handing on {action}")
        queue = self._sent.setdefault((stage, action.kind), deque())
        queue.append((self._place[stage][taken_by], transfer))

    def finish(self) -> None:
        """Wait until every message was taken."""
        for stage, _ in list(self._sent):
            self._free(stage, len(self._place[stage]))

    def _free(self, stage: int, done: int) -> None:
        """Free the messages that a stage took before its action number ``done`` ended."""
        for kind in (FORWARD, BACKWARD):
            queue = self._sent.get((stage, kind), deque())
            with self._mesh.naming_stages():
                while queue and queue[0][0] <= done:
                    queue.popleft()[1].wait()


def empty_message(width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """An empty tensor, from which ``StageLinks`` reads width, type and device."""
    return torch.empty(0, width, dtype=dtype, device=device)
