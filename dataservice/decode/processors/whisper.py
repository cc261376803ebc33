"""Whisper's clock: how many tokens a recording costs at 16 kHz.

Source: Whisper (arXiv:2212.04356) §2.2 and Qwen2-Audio (arXiv:2407.10759) §2. The rank computes
the log-mel spectrogram; only samples travel. For a chunk of `samples` at 16 kHz

    log-mel frames   samples / 160             100 a second; samples is a multiple of 160
    encoder tokens   (frames − 1) // 2 + 1      50 a second; the stem's stride of 2, padding 1
    LLM tokens       encoder tokens // pool     25 a second at pool 2, as Qwen2-Audio averages

so 30 s are 3,000 frames, 1,500 encoder tokens and 750 LLM tokens. A recording longer than
`chunk_s` becomes several items, end to end under one placeholder. Chunks are padded with
silence to a whole frame (at most 10 ms) and to at least one LLM token.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

from dataservice.core.errors import SpecError
from dataservice.core.job import STRICT

SAMPLE_RATE_HZ = 16_000
HOP_SAMPLES = 160


@dataclass(frozen=True, kw_only=True, slots=True)
class AudioChunk:
    """One audio item: float32[samples] and its cost."""

    samples: int
    encoder_tokens: int
    llm_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class WhisperProcessor:
    """Whisper's encoder on 16 kHz mono, with average pooling before the LLM."""

    __pydantic_config__: ClassVar[dict[str, object]] = STRICT

    kind: Literal["whisper"] = "whisper"
    """Chooses this processor."""
    pool: int = 2
    """Encoder tokens averaged into one LLM token: 2 as in Qwen2-Audio, 1 for none."""
    chunk_s: float = 30.0
    """Longest item, in seconds; longer recordings are cut. Whisper's positions end at 30."""

    def __post_init__(self) -> None:
        if not 1 <= self.pool <= 64:
            raise SpecError(f"whisper pool is {self.pool}; it must be in 1..64.")
        hundredths = self.chunk_s * 100
        if not 1.0 <= self.chunk_s <= 30.0 or abs(hundredths - round(hundredths)) > 1e-6:
            raise SpecError(
                f"whisper chunk_s is {self.chunk_s}; it must be in 1..30, a multiple of 0.01."
            )

    @property
    def min_samples(self) -> int:
        """The shortest chunk that gives one LLM token."""
        return (2 * self.pool - 1) * HOP_SAMPLES

    def plan(self, samples: int) -> tuple[AudioChunk, ...]:
        """Chunks of a recording of int `samples` at 16 kHz, in order; at least one."""
        chunk = round(self.chunk_s * 100) * HOP_SAMPLES
        whole, rest = divmod(samples, chunk)
        lengths = [chunk] * whole + ([rest] if rest or not whole else [])
        return tuple(self._chunk(length) for length in lengths)

    def _chunk(self, samples: int) -> AudioChunk:
        frames = -(-max(samples, self.min_samples) // HOP_SAMPLES)
        encoder_tokens = (frames - 1) // 2 + 1
        return AudioChunk(
            samples=frames * HOP_SAMPLES,
            encoder_tokens=encoder_tokens,
            llm_tokens=encoder_tokens // self.pool,
        )
