"""The wanted frames of a clip, decoded run by run.

Every packet read is compared with the table that planned the runs, and every frame is found by its
time. Any difference raises `FramesDisagree`; the caller then finds the same frames in a simpler
way.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import chain

import numpy as np
from av.container import InputContainer
from av.error import FFmpegError
from av.packet import Packet
from av.video.frame import VideoFrame
from av.video.stream import VideoStream

from dataservice.decode.frame_table import FrameTable, Run

# Reading this many packets costs about as much time as seeking.
SEEK_FROM_PACKETS = 64


class FramesDisagree(Exception):
    """Packets or frames differ from the table."""


def read_frames(
    container: InputContainer,
    stream: VideoStream,
    table: FrameTable,
    runs: Sequence[Run],
    *,
    seeking: bool,
) -> Iterator[tuple[int, VideoFrame]]:
    """(number, frame) of each wanted frame, run by run.

    Without `seeking`, packets between two runs are read and dropped, so that FFmpeg needs no index
    of the file.

    Raises:
        FramesDisagree: packets or frames differ from the table.
        FFmpegError: a packet before a wanted frame is damaged.
    """
    packets = _Packets(container, stream, table, seeking=seeking)
    for run in runs:
        yield from _decoded(stream, table, run, packets.of(run))


class _Packets:
    """The packets of a track, each checked against the table."""

    def __init__(
        self, container: InputContainer, stream: VideoStream, table: FrameTable, *, seeking: bool
    ) -> None:
        self._container, self._stream, self._table = container, stream, table
        self._seeking = seeking
        self._next = 0
        self._read = container.demux(stream)

    def of(self, run: Run) -> "Iterator[tuple[int, Packet[VideoStream]]]":
        """The packets of a run, with their indices."""
        ahead = None
        if self._seeking and run.first - self._next > SEEK_FROM_PACKETS:
            ahead = self._seek(run.first)
        while self._next <= run.last:
            packet, ahead = ahead or self._take(), None
            if packet.pts != self._table.times[self._next]:
                raise FramesDisagree
            self._next += 1
            if self._next > run.first:
                yield self._next - 1, packet

    def _seek(self, first: int) -> "Packet[VideoStream]":
        """Seek; the packet found, at or before `first`, which becomes the next packet."""
        self._container.seek(int(self._table.times[first]), stream=self._stream)
        self._read = self._container.demux(self._stream)
        packet = self._take()
        (places,) = np.nonzero(self._table.times == packet.pts)
        if not len(places) or places[0] > first:
            raise FramesDisagree
        self._next = int(places[0])
        return packet

    def _take(self) -> "Packet[VideoStream]":
        for packet in self._read:
            if packet.size:
                return packet
        raise FramesDisagree


def _decoded(
    stream: VideoStream,
    table: FrameTable,
    run: Run,
    packets: "Iterator[tuple[int, Packet[VideoStream]]]",
) -> Iterator[tuple[int, VideoFrame]]:
    """The wanted frames of one run.

    Frames that no other frame refers to are decoded only if they are wanted. Frames stored or shown
    before the key frame may refer to frames before the run: errors there are not damage.
    """
    context, begin = stream.codec_context, int(table.times[run.key])
    missing = {int(table.times[place]): frame for place, frame in run.frames.items()}
    # A key frame that an edit list hides is decoded but not shown.
    is_begun = not table.is_shown[run.key]
    shown: float = -math.inf
    for place, packet in chain(packets, ((run.last, None),)):  # None drains
        is_wanted = place in run.frames or place == run.key
        context.skip_frame = "DEFAULT" if is_wanted else "NONREF"
        try:
            frames = context.decode(packet)
        except FFmpegError:
            if place >= run.key and table.times[place] >= begin:
                raise
            continue
        for frame in frames:
            if frame.pts is None or frame.pts <= shown:
                raise FramesDisagree
            shown = frame.pts
            # A container may be wrong about which frames are key frames; a decoder is not.
            is_begun |= frame.pts == begin and frame.key_frame
            if frame.pts in missing:
                if not is_begun or frame.is_corrupt or frame.interlaced_frame:
                    raise FramesDisagree
                yield missing.pop(frame.pts), frame
    context.flush_buffers()
    if missing:
        raise FramesDisagree
