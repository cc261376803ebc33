"""One file of a sample: from its header to planned encoder items, from its bytes to arrays."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dataservice.core.errors import SampleError
from dataservice.core.limits import DecodeLimits
from dataservice.core.sample import MediaBlob, Modality
from dataservice.decode.audio import audio_samples, decode_audio
from dataservice.decode.image import decode_image, image_size
from dataservice.decode.processors.base import VideoHeader, VisionPlan, VisionProcessor
from dataservice.decode.processors.whisper import AudioChunk, WhisperProcessor
from dataservice.decode.video import decode_video, video_header

ItemArray = NDArray[np.uint8] | NDArray[np.float32]


@dataclass(frozen=True, kw_only=True, slots=True)
class ItemCost:
    """One encoder item without its place in the sample."""

    modality: Modality
    encoder_tokens: int
    llm_tokens: int
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """Memory of the decoded item."""
        return math.prod(self.shape) * (1 if self.modality is Modality.VISION else 4)


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageMedia:
    """An image and its plan."""

    plan: VisionPlan


@dataclass(frozen=True, kw_only=True, slots=True)
class VideoMedia:
    """A clip, what its header says, and its plan."""

    header: VideoHeader
    plan: VisionPlan


@dataclass(frozen=True, kw_only=True, slots=True)
class AudioMedia:
    """A recording of `samples` at 16 kHz, cut into chunks."""

    samples: int
    chunks: tuple[AudioChunk, ...]


Media = ImageMedia | VideoMedia | AudioMedia


def item_costs(media: Media) -> tuple[ItemCost, ...]:
    """The encoder items of one file, in the order of their tokens; at least one."""
    if isinstance(media, AudioMedia):
        return tuple(
            ItemCost(
                modality=Modality.AUDIO,
                encoder_tokens=chunk.encoder_tokens,
                llm_tokens=chunk.llm_tokens,
                shape=(chunk.samples,),
            )
            for chunk in media.chunks
        )
    return (
        ItemCost(
            modality=Modality.VISION,
            encoder_tokens=media.plan.encoder_tokens,
            llm_tokens=media.plan.llm_tokens,
            shape=media.plan.shape,
        ),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class MediaPipeline:
    """The processors of a job. None stands for a modality that the job does not have."""

    vision: VisionProcessor | None
    audio: WhisperProcessor | None
    limits: DecodeLimits

    def plan(self, blob: MediaBlob) -> Media:
        """Read the header only.

        Raises:
            SampleError: unreadable, over a limit, or of a kind that the job has no processor for.
        """
        self.limits.check("max_media_bytes", len(blob.data), f"{blob.kind} {blob.name!r}: bytes")
        if not blob.data:
            raise SampleError(
                f"{blob.kind} {blob.name!r} is empty (0 bytes). Replace the file or leave it out."
            )
        if blob.kind == "audio":
            return self._plan_audio(blob)
        if self.vision is None:
            raise _no_processor(blob, "vision", "vision: {kind: qwen2_vl}")
        if blob.kind == "image":
            width, height = image_size(blob, self.limits)
            with _naming(blob):
                plan = self.vision.plan_image(width=width, height=height)
                return ImageMedia(plan=self._allowed(plan))
        header = video_header(blob, self.limits)
        with _naming(blob):
            plan = self.vision.plan_video(header)
            return VideoMedia(header=header, plan=self._allowed(plan))

    def decode(self, blob: MediaBlob, media: Media) -> tuple[ItemArray, ...]:
        """The arrays of `item_costs(media)`, in the same order and of the same shapes.

        Raises:
            SampleError: damaged, or cannot take the planned shape.
        """
        if isinstance(media, AudioMedia):
            return decode_audio(blob, media.samples, media.chunks, self.limits)
        if isinstance(media, ImageMedia):
            return (decode_image(blob, media.plan, self.limits),)
        return (decode_video(blob, media.header, media.plan, self.limits),)

    def _allowed(self, plan: VisionPlan) -> VisionPlan:
        """The plan, unless a processor's options ask for more than the service allows."""
        for view in plan.views:
            self.limits.check("max_image_pixels", view.width * view.height, "resized, its pixels")
        self.limits.check("max_decoded_bytes", math.prod(plan.shape), "decoded, its bytes")
        return plan

    def _plan_audio(self, blob: MediaBlob) -> AudioMedia:
        if self.audio is None:
            raise _no_processor(blob, "audio", "audio: {kind: whisper}")
        samples = audio_samples(blob, self.limits)
        return AudioMedia(samples=samples, chunks=self.audio.plan(samples))


@contextmanager
def _naming(blob: MediaBlob) -> Iterator[None]:
    """Puts the file's name in front of a processor's error, which knows numbers only."""
    try:
        yield
    except SampleError as error:
        raise SampleError(f"{blob.kind} {blob.name!r}: {error}") from error
    except Exception as error:  # a custom processor may raise anything
        raise SampleError(
            f"{blob.kind} {blob.name!r}: the vision processor failed with "
            f"{type(error).__name__}: {error}. Mend the processor, or leave the sample out."
        ) from error


def _no_processor(blob: MediaBlob, modality: str, example: str) -> SampleError:
    return SampleError(
        f"{blob.kind} {blob.name!r} needs a processor of {modality}, and the job's pipeline has "
        f"none. Add one to the job file (for example {example}) or leave such samples out."
    )
