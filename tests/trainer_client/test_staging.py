"""Microbatches reach the device in one copy each, one ahead, and the host waits for none."""

from dataclasses import dataclass, replace

import pytest
import torch

from tests.trainer_client.copies import CountedCopies, Loopback
from trainer_client.device import DeviceCopier, PlainQueue, StreamQueue
from trainer_client.runtime import LayoutError, PackedAttention, PeerGroup
from trainer_client.runtime.block_attention import choose_kernel
from trainer_client.runtime.ring_layout import RingLayout, build_ring_layout, causal_layouts
from trainer_client.runtime.ring_operator import BoundPack
from trainer_client.runtime.ring_passes import pass_backward, pass_forward
from trainer_client.staging import BufferCopies, bundled, copied_once, with_tensors
from trainer_client.synthetic import SyntheticJob, SyntheticMedia, synthetic_shards

META = torch.device("meta")
JOB = SyntheticJob(
    replicas=16, microbatches=3, memory_tokens=160, degrees=(16,), sample_tokens=(5, 90),
    loss_weights=True, media=SyntheticMedia(images=1.0, sounds=0.5, side_px=(28, 60),
                                            sound_s=(0.1, 0.3)),
)  # fmt: skip


@dataclass(frozen=True)
class Tree:
    name: str
    numbers: tuple[int, ...]
    held: tuple[torch.Tensor | None, ...]


def tree():
    return Tree(
        name="a",
        numbers=(1, 2),
        held=(
            torch.arange(5, dtype=torch.int32),
            None,
            torch.arange(12.0).view(3, 4).T,
            torch.empty(3, 0, dtype=torch.int64),
            torch.tensor([True]),
        ),
    )


def test_bundled_tensors_are_the_same_and_lie_in_one_buffer():
    before = tree()
    after = bundled(lambda move: with_tensors(before, move), pin=False)
    assert (after.name, after.numbers) == ("a", (1, 2))
    for mine, theirs in zip(after.held, before.held, strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None:
            assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape)
            assert torch.equal(mine, theirs)
    held = [tensor for tensor in after.held if tensor is not None and tensor.numel()]
    assert len({tensor.untyped_storage().data_ptr() for tensor in held}) == 1


def test_a_buffer_is_copied_once_whatever_views_there_are_of_it():
    packed = bundled(lambda move: with_tensors(tree(), move), pin=False)
    made = []
    copies = BufferCopies(lambda whole: made.append(whole) or whole.clone(), torch.device("cpu"))
    there = with_tensors(packed, copies)
    assert len(made) == 1
    for mine, theirs in zip(there.held, tree().held, strict=True):
        assert mine is None or (mine.dtype == theirs.dtype and torch.equal(mine, theirs))


def test_a_layout_of_any_degree_reaches_a_device_in_one_copy():
    lengths = [1, 37, 64, 200]
    padded = [-(-length // 32) * 32 for length in lengths]
    offsets = [0, *torch.tensor(padded).cumsum(0).tolist()]
    with CountedCopies() as copies:
        layout = build_ring_layout(
            offsets, degree=16, cp_rank=3, causal=True, lengths=lengths, device=META
        )
    assert (copies.blocking, len(copies.started)) == ([], 1)
    tensors = []
    with_tensors(layout, lambda tensor: tensors.append(tensor) or tensor)
    assert len(tensors) > 40
    assert {tensor.device.type for tensor in tensors} == {"meta"}


def test_what_stays_on_the_host_is_not_copied():
    layout = build_ring_layout([0, 8], degree=1, cp_rank=0, causal=True)
    assert copied_once(layout, torch.device("cpu")) is layout


def attend(microbatch, device, group):
    """One layer's attention, forward and backward, as the operator computes it on a device: one
    without storage would see the operator's shapes alone."""
    layout = microbatch.layouts.get(True) or build_ring_layout(
        microbatch.cu_seqlens.tolist(),
        degree=group.size,
        cp_rank=group.index,
        causal=True,
        lengths=microbatch.lengths.tolist(),
        device=device,
    )
    q, k, v = (torch.randn(microbatch.local_tokens, heads, 8, device=device) for heads in (4, 2, 2))
    how = {"layout": layout, "group": group, "kernel": choose_kernel(q, v), "scale": 0.3}
    out, lse = pass_forward(q, k, v, **how)
    pass_backward(torch.ones_like(out), q, k, v, out, lse, **how)


def test_a_microbatch_costs_one_copy_and_the_host_waits_for_nothing():
    shard = synthetic_shards(JOB)[5]
    assert shard.plan.degrees == (16, 16, 16)
    with CountedCopies() as copies:
        for microbatch in DeviceCopier(META).send(shard).microbatches:
            assert microbatch.input_ids.device == META
            attend(microbatch, META, Loopback(16, microbatch.cp_rank))
    assert copies.blocking == []
    assert copies.read == []
    assert len(copies.started) == len(shard.microbatches)


@pytest.mark.parametrize(
    "mask", [{}, {"window": 2}, {"spans": torch.tensor([-1, 0, 0, -1])}], ids=lambda mask: [*mask]
)
def test_attention_takes_the_layout_that_came_with_its_microbatch(mask):
    """That of another pack is refused as one that does not fit, so it was not worked out again."""
    another = build_ring_layout([0, 4], degree=1, cp_rank=0, causal=True)
    attention = PackedAttention([0, 8], layouts={True: another})
    q = torch.ones(8, 2, 8)
    with pytest.raises(LayoutError, match="gives each of its 1 replicas 4"):
        attention(q, q, q, **mask)
    assert attention(q, q, q, causal=False).shape == q.shape, "which it does not know yet"


def test_windows_and_spans_cost_no_copy_beside_that_of_their_microbatch():
    shard = synthetic_shards(replace(JOB, degrees=(1,) * JOB.replicas))[5]
    with CountedCopies() as copies:
        for microbatch in DeviceCopier(META).send(shard).microbatches:
            bounds, lengths = microbatch.cu_seqlens.tolist(), microbatch.lengths.tolist()
            pack = BoundPack(bounds, lengths, PeerGroup((5,), index=0), microbatch.layouts)
            spans = torch.zeros(microbatch.local_tokens, dtype=torch.int64, device=META)
            rows = [
                pack.layout(True, window, seen, META).blocks[0].queries
                for window in (None, 2)
                for seen in (None, spans)
            ]
            assert all(each is rows[0] for each in rows), "those that came with it"
    assert copies.blocking == []
    assert copies.read == []
    assert len(copies.started) == len(shard.microbatches)


class CountedQueue(PlainQueue):
    """Copies on the host, and which microbatch was started and taken up when."""

    def __init__(self):
        super().__init__(torch.device("cpu"))
        self.log, self.copies = [], 0

    def start(self, microbatch):
        self.log.append(f"start {microbatch.wave}")
        return super().start(microbatch)

    def arrive(self, sent):
        self.log.append(f"take {sent.microbatch.wave}")
        return super().arrive(sent)

    def copy(self, whole):
        self.copies += 1
        return whole.clone()


def staged():
    queue = CountedQueue()
    shard = synthetic_shards(JOB)[2]
    return shard, DeviceCopier(torch.device("cpu"), queue=queue).send(shard), queue


def test_each_microbatch_is_copied_while_the_one_before_it_computes():
    _, shard, queue = staged()
    assert queue.log == ["start 0"], "the prefetch thread starts the first"
    for microbatch in shard.microbatches:
        queue.log.append(f"compute {microbatch.wave}")
    assert queue.log == [
        "start 0", "take 0", "start 1", "compute 0",
        "take 1", "start 2", "compute 1", "take 2", "compute 2",
    ]  # fmt: skip
    assert queue.copies == 3


def test_microbatches_that_are_taken_up_in_another_order_are_copied_once_each():
    _, shard, queue = staged()
    shard.microbatches.take_in_order([2, 0, 1])
    held = [shard.microbatches[place] for place in (2, 0, 1)]
    assert [microbatch.wave for microbatch in held] == [2, 0, 1]
    assert queue.log == ["start 0", "start 2", "take 2", "take 0", "start 1", "take 1"]
    assert queue.copies == 3


def test_values_and_types_are_those_of_the_host():
    before, after, _ = staged()
    moved = []
    for mine, theirs in zip(after.microbatches, before.microbatches, strict=True):
        pairs = []
        mine.mapped(lambda tensor, into=pairs: into.append(tensor) or tensor)
        wanted = []
        whole = theirs.laid_out(causal_layouts(theirs))
        whole.mapped(lambda tensor, into=wanted: into.append(tensor) or tensor)
        for tensor, other in zip(pairs, wanted, strict=True):
            assert (tensor.dtype, tensor.shape) == (other.dtype, other.shape)
            assert torch.equal(tensor, other)
        moved += pairs
    assert len(moved) > 100


def test_what_nobody_holds_any_more_has_left_the_device():
    _, shard, queue = staged()
    held = [shard.microbatches[0]]
    assert shard.microbatches[0] is held[0]
    assert shard.microbatches[1].wave == 1
    assert queue.copies == 3, "the two, and the one ahead"
    held.clear()
    assert shard.microbatches[0].wave == 0
    assert queue.copies == 5, "again the first, and the one behind it"


def test_places_are_those_of_a_sequence():
    _, shard, _ = staged()
    assert len(shard.microbatches) == 3
    assert shard.microbatches[-1].wave == 2
    assert [mb.wave for mb in shard.microbatches[:2]] == [0, 1]
    with pytest.raises(IndexError):
        shard.microbatches[3]


def test_the_plan_can_be_read_without_copying_anything():
    _, shard, queue = staged()
    assert sum(int((mb.labels != -100).sum()) for mb in shard.planned) > 0
    assert queue.log == ["start 0"]


def test_copying_does_not_count_as_reading():
    _, shard, _ = staged()
    for microbatch in shard.microbatches:
        assert microbatch.reads == set()
        assert all(of is None or of.reads == set() for of in (microbatch.vision, microbatch.audio))


def test_a_layout_is_made_for_each_microbatch_that_computes():
    shard = synthetic_shards(replace(JOB, replicas=3, degrees=(2,)))[1]
    for microbatch in shard.microbatches:
        layouts = causal_layouts(microbatch)
        assert set(layouts) == (set() if microbatch.idle else {True})
        for layout in layouts.values():
            assert isinstance(layout, RingLayout)
            assert layout.rows == microbatch.local_tokens


class RecordedCuda:
    """CUDA's streams and events as far as copies use them; notes what was queued where."""

    def __init__(self, monkeypatch):
        self.log, self.current = [], "computing"
        recorded = self

        class Event:
            def __init__(self, *, enable_timing):
                self.name = None

            def record(self, stream):
                self.name = f"event {sum('record' in each for each in recorded.log)}"
                recorded.log.append(f"record {self.name} on {stream.name}")

        class Stream:
            def __init__(self, device=None, name="copying"):
                self.name = name

            def wait_event(self, event):
                recorded.log.append(f"{self.name} waits for {event.name}")

        class Entered:
            def __init__(self, stream):
                self.stream = stream

            def __enter__(self):
                recorded.current = self.stream.name

            def __exit__(self, *_):
                recorded.current = "computing"

        def keep(buffer, stream):
            recorded.log.append(f"keep a buffer for {stream.name}")

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "Stream", Stream)
        monkeypatch.setattr(torch.cuda, "stream", Entered)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _: Stream(name=self.current))
        monkeypatch.setattr(torch.Tensor, "record_stream", keep)


def test_on_a_gpu_the_computing_stream_waits_for_the_copies_and_keeps_their_buffers(monkeypatch):
    cuda = RecordedCuda(monkeypatch)

    class Noted(StreamQueue):
        def copy(self, whole):
            cuda.log.append(f"copy on {cuda.current}")
            return super().copy(whole)

    first, second, _ = synthetic_shards(JOB)[2].microbatches
    queue = Noted(META)
    sent = queue.start(first)
    assert cuda.log == ["record event 0 on copying", *["copy on copying"] * len(sent.buffers),
                        "record event 1 on copying"]  # fmt: skip
    queue.start(second)
    cuda.log.clear()
    assert queue.arrive(sent) is sent.microbatch
    kept = ["keep a buffer for computing"] * len(sent.buffers)
    assert cuda.log == ["computing waits for event 1", *kept]


def test_pinned_tensors_are_copied_from_where_they_arrived(monkeypatch):
    part = torch.arange(64, dtype=torch.uint8)
    pinned = {part.untyped_storage().data_ptr()}

    def is_pinned(tensor):
        return tensor.untyped_storage().data_ptr() in pinned

    monkeypatch.setattr(torch.Tensor, "is_pinned", is_pinned)
    make = torch.empty

    def empty(*size, pin_memory=False, **options):
        made = make(*size, **options)
        if pin_memory:
            pinned.add(made.untyped_storage().data_ptr())
        return made

    monkeypatch.setattr(torch, "empty", empty)
    items = part[:40].view(2, 20), part[40:], torch.tensor([1, 2])
    packed = bundled(lambda move: with_tensors(items, move), pin=True)
    assert packed[0] is items[0]
    assert packed[1] is items[1]
    assert all(is_pinned(tensor) for tensor in packed)
    copies = BufferCopies(torch.clone, torch.device("cpu"))
    there = with_tensors(packed, copies)
    assert len(copies.buffers) == 2, "the part, and what was made on the host"
    assert all(torch.equal(mine, other) for mine, other in zip(there, items, strict=True))
