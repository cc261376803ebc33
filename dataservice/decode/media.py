"""One file of a sample: its header gives the planned encoder items, its bytes their arrays."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

import numpy as np
from numpy.typing import NDArray

from dataservice.core.errors import SampleError
from dataservice.core.limits import DecodeLimits
from dataservice.core.sample import ItemArray, ItemKind, MediaBlob, Modality
from dataservice.decode.audio import audio_samples, decode_audio
from dataservice.decode.image import decode_image, image_size, read_image
from dataservice.decode.processors.base import PixelMaker, VisionPlan, VisionProcessor
from dataservice.decode.processors.whisper import AudioChunk, WhisperProcessor
from dataservice.decode.video import Clip, check_cost, decode_video, read_clip


@dataclass(frozen=True, kw_only=True, slots=True)
class ItemCost:
    """The cost of one encoder item, without its place in the sample."""

    modality: Modality
    encoder_tokens: int
    llm_tokens: int
    shape: tuple[int, ...]
    kind: ItemKind
    grid: tuple[int, int, int, int] | None = None
    seconds_per_patch: float | None = None

    @property
    def size_bytes(self) -> int:
        """Memory that the decoded item takes."""
        return math.prod(self.shape) * (1 if self.modality is Modality.VISION else 4)


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageMedia:
    """An image and its plan."""

    plan: VisionPlan


@dataclass(frozen=True, kw_only=True, slots=True)
class VideoMedia:
    """A clip: its container's description, and its plan."""

    clip: Clip
    plan: VisionPlan


@dataclass(frozen=True, kw_only=True, slots=True)
class AudioMedia:
    """A recording of `samples` at 16 kHz, cut into chunks."""

    samples: int
    chunks: tuple[AudioChunk, ...]


Media = ImageMedia | VideoMedia | AudioMedia


def run_costs(media: Media) -> tuple[tuple[ItemCost, ...], ...]:
    """The encoder items of one file, by the run of tokens that they fill end to end, in the order
    of their tokens. Chunks of sound share one run; a run of vision is one item."""
    if isinstance(media, AudioMedia):
        chunks = (
            ItemCost(
                modality=Modality.AUDIO,
                encoder_tokens=chunk.encoder_tokens,
                llm_tokens=chunk.llm_tokens,
                shape=(chunk.samples,),
                kind=ItemKind.RECORDING,
            )
            for chunk in media.chunks
        )
        return (tuple(chunks),)
    plan, runs = media.plan, media.plan.runs
    item = ItemCost(
        modality=Modality.VISION,
        encoder_tokens=plan.encoder_tokens // runs,
        llm_tokens=plan.llm_tokens // runs,
        shape=(plan.shape[0] // runs, *plan.shape[1:]),
        kind=ItemKind.IMAGE if isinstance(media, ImageMedia) else ItemKind.CLIP,
        grid=plan.grid,
        seconds_per_patch=plan.seconds_per_patch,
    )
    return ((item,),) * runs


def texts_of(media: Media) -> tuple[str, ...]:
    """The texts before, between and behind the runs of a file: one more than runs."""
    return ("", "") if isinstance(media, AudioMedia) else media.plan.texts


@dataclass(frozen=True, kw_only=True, slots=True)
class MediaPipeline:
    """The processors of a job; None for a modality that the job does not have."""

    vision: VisionProcessor | None
    audio: WhisperProcessor | None
    limits: DecodeLimits

    def plan(self, blob: MediaBlob) -> Media:
        """Plan a file from its header alone.

        Raises:
            SampleError: the file is unreadable, above a limit, or of a kind that the job has no
                processor for.
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
                plan = self._allowed(self.vision.plan_image(width=width, height=height))
                self._check_squares(plan, max(width, height))
                return ImageMedia(plan=plan)
        clip = read_clip(blob, self.limits)
        with _naming(blob):
            plan = self._allowed(self.vision.plan_video(clip.header))
            _check_frames(plan, clip.header.frames)
        check_cost(blob, clip, plan, self.limits)
        return VideoMedia(clip=clip, plan=plan)

    def decode(
        self, blob: MediaBlob, media: Media, places: Sequence[ItemArray] = ()
    ) -> tuple[ItemArray, ...]:
        """The arrays of all items of `run_costs(media)`, in the same order and of the same shapes.
        A file is decoded once, and its frames are shared out among the runs. Where there are
        `places` of these shapes, the pixels of a picture that is one run are made in its place.

        Raises:
            SampleError: the file is damaged, or cannot take the planned shape.
        """
        if isinstance(media, AudioMedia):
            return decode_audio(blob, media.samples, media.chunks, self.limits)
        if isinstance(media, ImageMedia):
            alone = places and media.plan.runs == 1
            place = cast(NDArray[np.uint8], places[0]) if alone else None
            pixels = self._decoded_image(blob, media.plan, place)
        else:
            pixels = decode_video(blob, media.clip, media.plan, self.limits)
        runs = media.plan.runs
        return (pixels,) if runs == 1 else tuple(np.split(pixels, runs))

    def _decoded_image(
        self, blob: MediaBlob, plan: VisionPlan, place: NDArray[np.uint8] | None
    ) -> NDArray[np.uint8]:
        """A picture's tiles: by the plan's views, or by the processor itself."""
        if not callable(getattr(self.vision, "make_pixels", None)):
            return decode_image(blob, plan, self.limits, place)
        maker = cast(PixelMaker, self.vision)
        picture = np.asarray(read_image(blob, self.limits))
        with _naming(blob):
            pixels = maker.make_pixels(picture)
            if not isinstance(pixels, np.ndarray) or pixels.dtype != np.uint8:
                raise SampleError("the vision processor makes no uint8 array. Mend the processor.")
            if pixels.shape != plan.shape:
                raise SampleError(
                    f"the vision processor makes pixels {list(pixels.shape)}, and planned "
                    f"{list(plan.shape)} of the picture's size. Mend the processor."
                )
        return pixels

    def _allowed(self, plan: VisionPlan) -> VisionPlan:
        """The plan. Raises SampleError when it exceeds the service's limits."""
        for width, height in (size for view in plan.views for size in view.sizes):
            self.limits.check("max_image_pixels", width * height, "resized, its pixels")
        self.limits.check("max_decoded_bytes", math.prod(plan.shape), "decoded, its bytes")
        return plan

    def _check_squares(self, plan: VisionPlan, side: int) -> None:
        """Raises SampleError when a square around the picture would have too many pixels: the time
        of resizing grows with each."""
        if any(view.square for view in plan.views):
            self.limits.check("max_image_pixels", side * side, "centred on a square, its pixels")

    def _plan_audio(self, blob: MediaBlob) -> AudioMedia:
        if self.audio is None:
            raise _no_processor(blob, "audio", "audio: {kind: whisper}")
        samples = audio_samples(blob, self.limits)
        return AudioMedia(samples=samples, chunks=self.audio.plan(samples))


def _check_frames(plan: VisionPlan, frames: int) -> None:
    """Raises SampleError when the plan has frames that the clip does not have."""
    wanted = plan.frame_indices
    if not wanted or min(wanted) < 0 or max(wanted) >= frames:
        shown = f"frames {min(wanted)} to {max(wanted)}" if wanted else "no frames"
        raise SampleError(
            f"the vision processor plans {shown} of a clip that has frames 0 to {frames - 1}. "
            "Mend the processor."
        )


@contextmanager
def _naming(blob: MediaBlob) -> Iterator[None]:
    """Puts the file's name in front of a processor's error: a processor knows only numbers."""
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
