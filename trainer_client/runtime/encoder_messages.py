"""What encoders that run by themselves hand from stage to stage, over the row's one communicator.

A communicator does one rank's messages in the order in which it posts them, and any two stages may
have something for each other. So all of a step's messages have one order, which every stage works
out of the schedule (``BubbleSchedule.messages``), and each stage posts its own in that order.

    place     2t            2t + 1        turn t of an order in which all actions can run
              │ action t    │
    features  as late as one action before the first chunk takes them, or at once if made later:
              else its stage would need room for those of all microbatches
    gradients at once: who encoded waits for nobody else's

Why this cannot deadlock
------------------------
A message's place is behind the action that gives it and before the one that takes it. Take the
first message, in their order, that is not done. Every action whose turn comes before its place has
got what it takes, since that is in order before; so these actions run, and among them is the one
that gives the message. Its sender has done all that it posted before, so the message is sent. Its
receiver posts it at the latest as it begins its first action behind the place, and all of its
actions before that one run. So the message is done, and so is every later one.
``tests/trainer_client/runtime/test_pipeline_communicators.py`` replays whole steps.

Contract
--------
Success: a send never blocks the sender; its tensor is kept until the step ends. A receive is posted
one action ahead, or before what is to be sent behind it. Failure: as for the messages between
chunks, a PeerError.
"""

from collections import deque
from collections.abc import Callable

from torch import Tensor

from trainer_client.runtime.bubble_schedule import AnyAction, BubbleSchedule, EncoderMessage, Hop
from trainer_client.runtime.peers import Transfer
from trainer_client.runtime.pipeline_mesh import PipelineMesh


class EncoderMessages:
    """One step's messages of one stage, and what it keeps for itself."""

    def __init__(
        self,
        mesh: PipelineMesh,
        schedule: BubbleSchedule,
        *,
        travels: Callable[[Hop], bool],
        room_for: Callable[[Hop], Tensor],
    ) -> None:
        """``travels``: whether this replica has an item for what a hop brings. ``room_for``: an
        empty tensor to take it in."""
        self._mesh = mesh
        self._turns = schedule.turns
        self._room_for = room_for
        self._unposted = deque(
            message
            for message in schedule.messages
            if mesh.stage in (message.sender, message.receiver) and travels(message.hop)
        )
        self._given: dict[Hop, Tensor] = {}
        self._arriving: dict[Hop, tuple[Tensor, Transfer]] = {}
        self._sent: list[Transfer] = []

    def begin(self, action: AnyAction) -> None:
        """Before an action of this stage, and before it waits for anything."""
        self._post_until(2 * self._turns[self._mesh.stage, action])

    def give(self, hop: Hop, tensor: Tensor) -> None:
        """Hand this on, or keep it, where the stage takes it itself."""
        self._given[hop] = tensor
        self._post_until(-1)

    def take(self, hop: Hop) -> Tensor:
        """Wait for what comes by this hop. Raises PeerError."""
        if hop not in self._arriving:
            return self._given.pop(hop)
        arriving, transfer = self._arriving.pop(hop)
        with self._mesh.naming_stages():
            transfer.wait()
        return arriving

    def finish(self) -> None:
        """Wait until every message was taken."""
        with self._mesh.naming_stages():
            for transfer in self._sent:
                transfer.wait()
        self._sent.clear()

    def _post_until(self, place: int) -> None:
        """Post what has its place until there, and what is to be sent and what comes before it; but
        nothing that comes behind a tensor which is not made yet."""
        count = 0
        for number, message in enumerate(self._unposted, start=1):
            sends = message.sender == self._mesh.stage
            if sends and message.hop not in self._given:
                break
            if sends or message.place <= place:
                count = number
        for _ in range(count):
            self._post(self._unposted.popleft())

    def _post(self, message: EncoderMessage) -> None:
        row, hop = self._mesh.row, message.hop
        with self._mesh.naming_stages():
            if message.sender == self._mesh.stage:
                sent = [(self._given.pop(hop).contiguous(), message.receiver)]
                self._sent.append(row.post(sent, [], action=f"handing on {hop}"))
            else:
                arriving = self._room_for(hop)
                taken = [(arriving, message.sender)]
                self._arriving[hop] = arriving, row.post([], taken, action=f"taking in {hop}")
