"""Which packet holds which frame of a clip, and which packets must be decoded for the wanted
frames.

Frames are numbered as they are shown: frame k has the k-th smallest time of all packets that show
one. Decoding a frame needs the key frame before it and the packets in between, and nothing else:

    packets, in the order of decoding   K . . . . . K . . . . . K . . . . .
    wanted                                    w           w w
    decoded                             └─────┘     └───────┘                 two runs
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from av.container import InputContainer
from av.error import FFmpegError
from av.packet import Packet
from av.video.stream import VideoStream
from numpy.typing import NDArray

# Codecs in which a packet holds one frame, the decoder gives a packet's time to its frame, and no
# frame shown after a key frame needs a frame before it.
_ONE_FRAME_A_PACKET = frozenset({"h264", "hevc", "vp8", "vp9", "av1", "libdav1d"})
# Formats that store the time at which a frame is shown. (AVI does not; FFmpeg guesses it.)
_TIMED = frozenset({"mov,mp4,m4a,3gp,3g2,mj2", "matroska,webm", "mpegts", "flv"})
_PROGRESSIVE = (0, 1)  # AV_FIELD_UNKNOWN and AV_FIELD_PROGRESSIVE
_VP8_SHOWN = 0x10


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """Packets `first` to `last`, to be decoded in one go.

    `key` is the key frame from whose time on frames are whole: `first`, or a later one. `frames`
    maps the index of a packet to the number of its wanted frame.
    """

    first: int
    key: int
    last: int
    frames: dict[int, int]


@dataclass(frozen=True, kw_only=True)
class FrameTable:
    """The packets of a clip's video track in the order of decoding: [packets] each.

    `times` are presentation times, in ticks. `exact` is False when packets do not tell frames apart
    (their codec allows none or two frames per packet, times are missing or repeated, the clip is
    interlaced, its beginning was cut off): then frames can be found only by decoding from the
    first.
    """

    times: NDArray[np.int64]
    is_key: NDArray[np.bool_]
    is_shown: NDArray[np.bool_]
    spanned_s: float
    exact: bool

    @property
    def packets(self) -> int:
        """Number of packets, including those of frames that an edit list hides."""
        return len(self.times)

    @property
    def frames(self) -> int:
        """Number of frames that are shown."""
        return int(self.is_shown.sum())

    @cached_property
    def packet_of(self) -> NDArray[np.int64]:
        """int64[frames]: the packet of each frame, in the order of showing."""
        shown = np.flatnonzero(self.is_shown)
        return shown[np.argsort(self.times[shown], kind="stable")]

    @property
    def headless_frames(self) -> int:
        """Number of frames whose key frame was cut off: those stored or shown before the first key
        frame."""
        if not self.is_key.any():
            return 0
        first = int(np.argmax(self.is_key))
        late = (np.arange(self.packets) >= first) & (self.times >= self.times[first])
        return int((self.is_shown & ~late).sum())

    def runs(self, wanted: Sequence[int], *, lead: int = 0) -> tuple[Run, ...]:
        """What to decode for these frames, in the order of decoding.

        Each run begins `lead` key frames before the one that it needs. The first frame is always
        decoded too: if the decoder does not show it, as in a clip that was cut, the decoder numbers
        frames differently. O(packets + wanted · log(packets)).
        """
        keys = np.flatnonzero(self.is_key)
        numbers = np.unique([0, *wanted])
        numbers = numbers[np.argsort(self.packet_of[numbers])]
        packets = self.packet_of[numbers]
        # Frames may be shown before the key frame after which they are stored.
        stored = np.searchsorted(keys, packets, side="right")
        shown = np.searchsorted(self.times[keys], self.times[packets], side="right")
        places = np.minimum(stored, shown) - 1
        firsts = keys[np.maximum(places - lead, 0)]
        runs: list[Run] = []
        begin = 0
        for end in range(1, len(packets) + 1):
            if end == len(packets) or firsts[end] > packets[end - 1]:
                runs.append(
                    Run(
                        first=int(firsts[begin]),
                        key=int(keys[places[begin]]),
                        last=int(packets[end - 1]),
                        frames=dict(
                            zip(
                                packets[begin:end].tolist(),
                                numbers[begin:end].tolist(),
                                strict=True,
                            )
                        ),
                    )
                )
                begin = end
        return tuple(runs)

    def decoded_frames(self, wanted: Sequence[int]) -> int:
        """An upper bound on the number of frames that must be decoded to show the wanted ones."""
        if self.exact:
            return sum(run.last - run.first + 1 for run in self.runs(wanted))
        return min(max(wanted) + 1, max(self.frames, 1))


def read_frame_table(
    container: InputContainer, stream: VideoStream, most_packets: int
) -> FrameTable:
    """Reads all packets, or until there are more than `most_packets` or one is damaged; decodes
    none."""
    codec = stream.codec_context.name
    times, ends = array("q"), 0
    is_key, is_shown, complete = bytearray(), bytearray(), True
    try:
        for packet in container.demux(stream):
            if not packet.size:
                continue
            complete &= packet.pts is not None
            time = packet.pts if packet.pts is not None else packet.dts or 0
            times.append(time)
            ends = max(ends, time + (packet.duration or 0))
            is_key.append(packet.is_keyframe)
            is_shown.append(_shows(packet, codec))
            if len(times) > most_packets:
                break
    except FFmpegError:
        pass  # the caller decides whether too many are missing
    ticks = np.array(times, np.int64)
    key = np.array(is_key, np.bool_)
    return FrameTable(
        times=ticks,
        is_key=key,
        is_shown=np.array(is_shown, np.bool_),
        spanned_s=float((ends - ticks.min()) * (stream.time_base or 0)) if times else 0.0,
        exact=complete
        and container.format.name in _TIMED
        and stream.codec_context.name in _ONE_FRAME_A_PACKET
        and stream.codec_context.field_order in _PROGRESSIVE
        and _are_times(ticks, key, stream),
    )


def _are_times(times: NDArray[np.int64], is_key: NDArray[np.bool_], stream: VideoStream) -> bool:
    """Whether these can be the times of a whole clip's frames: the first is a key frame's, all
    differ, key frames are stored in the order of showing, and other frames are not, if the decoder
    reorders them."""
    if not len(times) or not is_key[0] or times[0] != times.min():
        return False
    if len(np.unique(times)) < len(times) or (np.diff(times[is_key]) < 0).any():
        return False
    is_reordered = bool((np.diff(times) < 0).any())
    return is_reordered or len(times) == 1 or not stream.codec_context.has_b_frames


def _shows(packet: "Packet[VideoStream]", codec: str) -> bool:
    """Whether the packet's frame is shown: no edit list hides it, and it is not only a reference
    for others."""
    return not packet.is_discard and not (codec == "vp8" and not bytes(packet)[0] & _VP8_SHOWN)
