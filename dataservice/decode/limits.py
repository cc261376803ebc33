"""How much one sample may ask of a worker, so that a hostile or broken file cannot exhaust it."""

from dataclasses import dataclass

from dataservice.core.errors import SampleError


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeLimits:
    """Caps on one sample, checked against headers before anything is decoded."""

    max_media_bytes: int = 2**30
    """Encoded size of one file."""
    max_image_pixels: int = 89_478_485
    """Width × height of one image; also the size from which Pillow suspects a bomb."""
    max_video_pixels: int = 8192 * 4352
    """Width × height of one video frame."""
    max_video_frames: int = 1_000_000
    """Frames of one clip before sampling."""
    max_video_s: float = 4 * 3600.0
    """Length of one clip."""
    max_audio_s: float = 4 * 3600.0
    """Length of one recording."""
    max_text_chars: int = 64 * 2**20
    """Characters of one sample's text."""
    max_media_items: int = 4096
    """Files of one sample."""

    def check(self, limit: str, value: float, what: str) -> None:
        """Raises SampleError when `value` is above the limit of that name."""
        allowed = getattr(self, limit)
        if value > allowed:
            raise SampleError(
                f"{what} is {value:,.10g}; the limit {limit} is {allowed:,.10g}. "
                "Leave the sample out, or make it smaller before indexing."
            )


DEFAULT_LIMITS = DecodeLimits()
