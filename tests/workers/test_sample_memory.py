"""What a decoder process hands over is checked against the plan before it is believed."""

import gc
import os
import socket
import struct

import numpy as np
import pytest

from dataservice.core.orders import PackSample
from dataservice.core.sample import ByteSpan, DecodedSample, SampleLocation, SampleRef
from dataservice.workers import sample_memory
from dataservice.workers.decoder_messages import (
    Answer,
    AnswerReader,
    Kind,
    ProtocolError,
    read_order,
    send_answer,
    send_order,
)
from dataservice.workers.sample_memory import (
    sample_buffers,
    sample_bytes,
    sample_of_memory,
    write_memory,
)
from tests.workers.memory_files import descriptors, mappings, require_same
from tests.workers.trouble import a_sample

PLANNED = a_sample(1, "k", tokens=5, images=1, sounds=2).lengths


def decoded():
    rng = np.random.default_rng(3)
    ids = rng.integers(0, 1000, 5, dtype=np.int32)
    strided = rng.integers(0, 256, (2, 224, 448, 3), dtype=np.uint8)[:, :, ::2]
    sounds = [rng.random(16001, dtype=np.float32) for _ in range(2)]
    return DecodedSample(input_ids=ids, labels=ids[::-1], items=(strided, *sounds))


def memory_of(sample):
    return write_memory(sample_buffers(sample, PLANNED), sample_bytes(PLANNED))


def test_a_sample_is_seen_through_a_mapping_that_ends_with_its_last_view():
    gc.collect()  # what other tests left behind must not go in between
    before = descriptors(), mappings()
    sample = sample_of_memory(memory_of(decoded()), PLANNED)
    require_same(sample, decoded())
    view = sample.items[1][5:9]
    del sample
    gc.collect()
    assert mappings() == before[1] + 1
    assert len(view.tolist()) == 4
    del view
    assert (descriptors(), mappings()) == before


def test_a_sample_that_cannot_be_mapped_is_read(monkeypatch):
    """A process may have only so many mappings."""
    no_room = type("Library", (), {"mmap": staticmethod(lambda *_: sample_memory.MAP_FAILED)})
    monkeypatch.setattr(sample_memory, "libc", no_room)
    gc.collect()
    before = mappings()
    sample = sample_of_memory(memory_of(decoded()), PLANNED)
    require_same(sample, decoded())
    assert mappings() == before


def test_memory_that_could_still_shrink_under_its_reader_is_refused():
    open_memory = os.memfd_create("sample", os.MFD_ALLOW_SEALING)
    os.ftruncate(open_memory, sample_bytes(PLANNED))
    with pytest.raises(ValueError, match="not sealed"):
        sample_of_memory(open_memory, PLANNED)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(open_memory)


def test_memory_of_another_size_than_planned_is_refused():
    with pytest.raises(ValueError, match="planned size"):
        sample_of_memory(write_memory([b"short"], 5), PLANNED)


# ---- messages -----------------------------------------------------------------------------


@pytest.fixture
def ends():
    one, other = socket.socketpair()
    yield one, other
    one.close()
    other.close()


def reader_of(sock):
    return AnswerReader(sock=sock, left_s=5.0)


def test_an_order_arrives_as_it_was_sent(ends):
    spans = tuple(ByteSpan(name=f"é {n}.jpg", offset_bytes=2**40 + n, size_bytes=n) for n in (0, 7))
    ref = SampleRef(
        sample_id=2**62,
        source="a/b",
        key="odd \udcff key",
        location=SampleLocation(file="s3://x/y.tar", spans=spans, row_group=3, row=-1, piece=2),
    )
    samples = [PackSample(ref=ref, lengths=PLANNED, epoch=3), a_sample(2, "")]
    send_order(ends[0], '{"tokenizer": "ü"}', samples, free=[3, 1], gone=[2])
    ends[0].close()
    order = read_order(ends[1])
    assert (order.pipeline, order.samples) == ('{"tokenizer": "ü"}', samples)
    assert (order.free, order.gone) == ([3, 1], [2])
    assert read_order(ends[1]) is None


def test_answers_arrive_with_their_own_descriptors(ends):
    files = [os.memfd_create(name) for name in "ab"]
    for number, file in enumerate(files):
        os.pwrite(file, str(number).encode(), 0)
        send_answer(ends[0], Answer(kind=Kind.BAD, payload=b"why", seconds=2.5))
        send_answer(ends[0], Answer(kind=Kind.MEMORY, descriptor=file))
        os.close(file)
    answers = reader_of(ends[1])
    for number in range(2):
        bad = answers.read()
        assert (bad.kind, bad.payload, bad.seconds) == (Kind.BAD, b"why", 2.5)
        received = answers.read().descriptor
        assert os.pread(received, 9, 0) == str(number).encode()
        assert not os.get_inheritable(received)
        os.close(received)


def _header(kind: int, size_bytes: int) -> bytes:
    """An answer's header with nothing measured."""
    return struct.pack("<BIddddQ?QQQ", kind, size_bytes, *[0.0] * 4, 0, False, 0, 0, 0)


@pytest.mark.parametrize(
    "junk",
    [
        _header(99, 0),
        _header(Kind.INLINE, 2**31),
        _header(Kind.MEMORY, 0),
        _header(Kind.NEW, 0),
    ],
)
def test_an_answer_that_makes_no_sense_is_refused(ends, junk):
    ends[0].sendall(junk)
    with pytest.raises(ProtocolError):
        reader_of(ends[1]).read()


@pytest.mark.parametrize(
    ("kind", "sent", "kinds"),
    [
        (Kind.INLINE, 1, tuple(Kind)),
        (Kind.NEW, 2, tuple(Kind)),
        (Kind.MEMORY, 1, (Kind.BUILT, Kind.REFUSED)),
    ],
    ids=["none announced", "one announced", "none expected"],
)
def test_descriptors_that_nobody_takes_are_closed_with_the_socket(ends, kind, sent, kinds):
    """A team's own code could send so many that a worker opens nothing more for anyone."""
    files = [os.memfd_create("sample") for _ in range(sent)]
    header = _header(kind, 0)
    socket.send_fds(ends[0], [header], files)
    for file in files:
        os.close(file)
    before, answers = descriptors(), reader_of(ends[1])
    with pytest.raises(ProtocolError):
        answers.read(kinds)
    assert descriptors() == before + sent
    answers.close()
    assert descriptors() == before


def test_an_answer_is_waited_for_until_its_deadline_however_it_trickles_in(ends):
    answers = AnswerReader(sock=ends[1], left_s=0.1)
    ends[0].sendall(b"\x03")
    with pytest.raises(TimeoutError):
        answers.read()
    send_answer(ends[0], Answer(kind=Kind.BAD, payload=b"why"))
    assert answers.read().payload == b"why", "what has arrived is not late"
    ends[0].close()
    with pytest.raises(ConnectionResetError):
        reader_of(ends[1]).read()
