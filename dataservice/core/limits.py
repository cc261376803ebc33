"""What one sample may ask of the process that reads and decodes it.

A hostile or broken file states sizes that it does not have, or unfolds to thousands of times
its own. Each way by which a user's bytes become memory or time has a cap here, checked before
the allocation it guards. The operator sets them, for all jobs of a service.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import ClassVar

from dataservice.core.errors import SampleError, SpecError
from dataservice.core.job import STRICT

_LISTS = (list, tuple)
_NESTED = (dict, *_LISTS, Mapping)  # the usual ones first: Mapping is asked by code in Python


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeLimits:
    """Caps on one sample. A sample that exceeds one is left out of the index, and the cap is
    named."""

    __pydantic_config__: ClassVar[dict[str, object]] = STRICT

    max_sample_bytes: int = 2**30
    """Encoded size of one sample, all its files together."""
    max_media_bytes: int = 2**30
    """Encoded size of one file."""
    max_media_items: int = 4096
    """Files of one sample: members of its archive, images of its row, paths of its record."""
    max_record_bytes: int = 16 * 2**20
    """Size of one sample's text and JSON: a line, a member, the textual cells of a row."""
    max_record_depth: int = 64
    """Depth to which a record's objects and lists may nest."""
    max_text_bytes: int = 2 * 2**20
    """One sample's text in UTF-8, as its chat template renders it. Tokenising takes some 250
    times that."""
    max_turns: int = 2048
    """Turns of one conversation."""
    max_decoded_bytes: int = 512 * 2**20
    """Pixels and sound that one sample becomes."""
    max_llm_tokens: int = 2**24
    """Tokens of one sample, those of its media included."""
    max_image_pixels: int = 89_478_485
    """Width × height of one image."""
    max_image_side: int = 65_535
    """Width or height of one image, the most that JPEG can say."""
    max_image_scans: int = 128
    """Passes of a progressive JPEG over its picture. Ten are usual."""
    max_video_pixels: int = 4096 * 4096
    """Width × height of one video frame; a decoder keeps up to 17 of them."""
    max_video_frames: int = 1_000_000
    """Frames of one clip before sampling."""
    max_video_s: float = 4 * 3600.0
    """Length of one clip."""
    max_video_decoded_pixels: int = 20_000_000_000
    """Width × height of all frames of one clip that must be decoded to show those wanted: the
    frames between them and the key frames before them."""
    max_media_packets: int = 4_000_000
    """Packets that the header of an MP4 may list, over all its tracks and edits."""
    max_media_streams: int = 32
    """Tracks of one clip or recording."""
    max_audio_s: float = 2 * 3600.0
    """Length of one recording."""
    max_audio_rate_hz: int = 768_000
    """Samples a second of one recording; the least is 1,000."""
    max_audio_channels: int = 64
    """Channels of one recording."""
    max_page_bytes: int = 256 * 2**20
    """Parquet: one page of a column, uncompressed. Reading a row takes the page it lies in. A
    dictionary may have a quarter of it: it is held several times."""
    max_row_group_values: int = 2**24
    """Parquet and Arrow: values of one column in one row group or record batch, the items of lists
    counted. MDS: samples of one shard."""
    max_header_bytes: int = 2**20
    """Tar: one extended header, such as that of a long name. MDS: the description of a shard's
    columns."""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not value > 0:
                raise SpecError(f"limits.{name} is {value}; it must be above 0.")

    def check(self, limit: str, value: float, what: str) -> None:
        """Raises SampleError where `value` is above the limit of that name, or is no number."""
        allowed = getattr(self, limit)
        if not value <= allowed:
            raise SampleError(
                f"{what} is {value:,.10g}; the limit {limit} is {allowed:,.10g}. Leave the sample "
                "out, make it smaller before indexing, or have the service's limits raised."
            )

    def check_text(self, texts: Sequence[str]) -> None:
        """Raises SampleError where texts have more than `max_text_bytes` in UTF-8 together."""
        # They are counted only where it matters: a character has 4 at most.
        if 4 * sum(map(len, texts)) > self.max_text_bytes:
            size = sum(len(text.encode(errors="surrogatepass")) for text in texts)
            self.check("max_text_bytes", size, "the sample: bytes of text")

    def check_nesting(self, value: object, what: str) -> None:
        """Raises SampleError where objects and lists nest deeper than `max_record_depth`.
        O(values)."""
        level, depth = [value], 0
        # Most values are text, of which it is soon known that it holds none.
        while level := [v for v in level if not isinstance(v, str) and isinstance(v, _NESTED)]:
            depth += 1
            self.check("max_record_depth", depth, f"{what}: levels of nesting")
            level = [inner for v in level for inner in (v if isinstance(v, _LISTS) else v.values())]

    @property
    def changed(self) -> dict[str, float]:
        """The limits that differ from their defaults, by name."""
        return {
            field.name: getattr(self, field.name)
            for field in fields(self)
            if getattr(self, field.name) != field.default
        }


DEFAULT_LIMITS = DecodeLimits()


@dataclass(frozen=True, kw_only=True, slots=True)
class OpeningLimits:
    """What opening a job may take: reading what its team wrote, in a process of its own. What
    exceeds one is refused, and that process ended."""

    __pydantic_config__: ClassVar[dict[str, object]] = STRICT

    timeout_s: float = 600.0
    """Until the job is open, its index read. Where files have other times than when they were
    indexed, their samples are read and compared within it."""
    late_index_samples: int = 1_000_000
    """Of an index of more samples, the lengths are read before the job is open, and locations and
    shapes while it runs already; a step that is planned before that has its own read."""
    memory_bytes: int = 8 * 2**30
    """Memory of its own: of an index some row groups are in it while it is read."""
    at_once: int = 4
    """Jobs that are opened at the same time, each in such a process; with two or more neither a
    team nor the submissions of those without one have all of them."""
    pipeline_cpu_s: float = 30.0
    """CPU seconds of loading the tokenizer and trying out the chat template."""
    pipeline_memory_bytes: int = 2**30
    """Memory of its own while it does so, its libraries included, about 280 MiB."""

    def __post_init__(self) -> None:
        if min(self.timeout_s, self.pipeline_cpu_s) <= 0:
            raise SpecError("job_opening: timeout_s and pipeline_cpu_s must be above 0.")
        if not 1 <= self.at_once <= 64:
            raise SpecError(f"job_opening: at_once is {self.at_once}; it must be from 1 to 64.")
        if self.late_index_samples < 0:
            raise SpecError(
                f"job_opening: late_index_samples is {self.late_index_samples:,}; it must be at "
                "least 0, of which every index's locations are read late."
            )
        if not 2**29 <= self.pipeline_memory_bytes <= self.memory_bytes:
            raise SpecError(
                f"job_opening: pipeline_memory_bytes is {self.pipeline_memory_bytes:,}; it must be "
                f"from {2**29:,} to memory_bytes, {self.memory_bytes:,}."
            )
