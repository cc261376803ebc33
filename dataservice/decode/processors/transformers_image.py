"""An image processor of transformers, for models whose family is not built in here.

The folder of a model says by its `preprocessor_config.json` which of transformers' image processors
it has, and with which options. That one runs here as it is, but for its last two steps: a worker
delivers the pixels resized and cut, as uint8, and the rank rescales and normalises them, as it does
with those of every family (`trainer_client.encoder_inputs.square_pixels`).

Steps are planned from sizes alone, so a processor is taken only if its tiles follow from a
picture's size, and if its last steps are (pixels / 255 − mean) / std. Both are tried out with
pictures of noise when a pipeline is built. Tokens are those of the tiles:

    encoder    tiles · (height // patch) · (width // patch)
    LLM        tiles · (height // patch // merge) · (width // patch // merge), or tiles ·
               tokens_per_tile
"""

import importlib
import json
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from dataservice.core.errors import SampleError, SpecError
from dataservice.core.job import STRICT
from dataservice.core.named_files import named_folder, read_named
from dataservice.core.quoting import cut, quoted
from dataservice.decode.processors.base import VideoHeader, View, VisionPlan, no_clips
from dataservice.decode.processors.frames import require_unit_frames

Pixels = NDArray[np.uint8]

FILES = ("preprocessor_config.json", "processor_config.json", "config.json")
"""Files that transformers reads of the folder, if they exist; one of the first two must."""
PROBES = ((64, 48), (301, 200), (97, 420))  # (width, height) in pixels
NORMALISED = 1e-4  # float32 leaves 1e-6; a processor that does something else differs by far more
SIZES_KEPT = 65_536

OTHER_TEXT = {
    "AyaVisionProcessor": "",
    "DeepseekOcr2ImageProcessor": "",
    "GraniteDoclingImageProcessor": "",
    "Idefics3ImageProcessor": "idefics3",
    "LlavaNextImageProcessor": "llava_next",
    "LlavaOnevisionImageProcessor": "",
    "Ovis2ImageProcessor": "",
    "PixtralProcessor": "",
    "SmolVLMImageProcessor": "smolvlm",
}
"""Classes of models whose tokens are not those of their tiles, each with the kind that is built in
for them: they write other tokens between rows or tiles, or none for what pads a picture."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TransformersImageSpec:
    """An image processor of transformers, where that library is installed with the service: for
    models whose family is not built in. Pictures only."""

    __pydantic_config__: ClassVar[dict[str, object]] = STRICT

    kind: Literal["transformers"] = "transformers"
    """Chooses transformers' own image processor."""
    folder: str
    """Folder of the model, with its preprocessor_config.json. Code in it is never run."""
    patch: int
    """Side of a patch of the model's encoder, in pixels."""
    merge: int = 1
    """Number of patches per side that merge into one LLM token."""
    tokens_per_tile: int | None = None
    """LLM tokens of each tile, in place of merge, for models that resample them to a fixed
    number."""
    unit_frames: int = 0
    """Tiles that the model's encoder takes together, where none attends to one outside: 1 where it
    encodes each by itself. Between those, large pictures may be cut for several replicas; by
    default they are whole."""

    def __post_init__(self) -> None:
        require_unit_frames(self.unit_frames)
        counts = {"patch": self.patch, "merge": self.merge, "tokens_per_tile": self.tokens_per_tile}
        for name, count in counts.items():
            if count is not None and not 1 <= count <= 4096:
                raise SpecError(f"vision {name} is {count}; it must be in 1..4096.")
        if self.tokens_per_tile is not None and self.merge != 1:
            raise SpecError(
                f"vision has tokens_per_tile: {self.tokens_per_tile} and merge: {self.merge}; both "
                "say how many LLM tokens a tile has. Keep one."
            )

    def load(self) -> "TransformersImageProcessor":
        """The processor of the folder. Takes seconds: it imports transformers.

        Raises:
            SpecError: it cannot be loaded, or is not one whose tiles follow from a picture's size,
                and tokens from its tiles.
        """
        processor = _loaded(self.folder)
        _refuse_other_text(self.folder, type(processor).__name__)
        return TransformersImageProcessor(self, processor)


class TransformersImageProcessor:
    """`VisionProcessor` and `PixelMaker` over an image processor of transformers."""

    def __init__(self, spec: TransformersImageSpec, processor: Any) -> None:
        """Raises SpecError where the processor is of another kind."""
        self._spec = spec
        self._processor = processor
        self._name = type(processor).__name__
        # Its tiles of one size are asked for at measuring, at decoding and by every like picture.
        self._tiles = lru_cache(SIZES_KEPT)(self._tried)
        _require_fit(processor, self._name)

    @property
    def identity(self) -> dict[str, object]:
        """What decides its tokens and pixels: the options, the class, its release. Not the place of
        the folder."""
        told = asdict(self._spec)
        del told["folder"], told["unit_frames"]  # where items may be cut decides no pixel
        backend = getattr(self._processor, "backend", "")
        libraries = ["transformers", *(["torchvision"] if backend == "torchvision" else [])]
        return {
            **told,
            "class": self._name,
            "options": self._processor.to_dict(),
            "releases": {name: _release(name) for name in libraries},
        }

    def plan_image(self, *, width: int, height: int) -> VisionPlan:
        """The tiles that the processor makes of a black picture of this size: it takes about as
        long as resizing the picture, once for each size. Raises SampleError where it makes none."""
        tiles, high, wide = self._tiles(width, height)
        spec = self._spec
        rows, columns = high // spec.patch, wide // spec.patch
        llm = spec.tokens_per_tile or (rows // spec.merge) * (columns // spec.merge)
        # The views only state how many tiles there are, and their size.
        view = View(
            width=wide, height=high, tile_width=wide, tile_height=high, origins=((0, 0),) * tiles
        )
        return VisionPlan(
            encoder_tokens=tiles * rows * columns, llm_tokens=tiles * llm, views=(view,)
        )

    def plan_video(self, header: VideoHeader) -> VisionPlan:
        """Raises SampleError: an image processor takes pictures only."""
        raise no_clips(self._name)

    def make_pixels(self, picture: Pixels) -> Pixels:
        """The tiles uint8[tiles, height, width, 3] of a picture uint8[h, w, 3]. Raises SampleError
        where they are no pixels."""
        return _tiles_of(self._processor, self._name, picture)

    def _tried(self, width: int, height: int) -> tuple[int, int, int]:
        tiles, high, wide, _ = self.make_pixels(np.zeros((height, width, 3), np.uint8)).shape
        return tiles, high, wide


def _loaded(folder: str) -> Any:
    """The image processor that the folder names."""
    # transformers would look for a folder that is not there among the models that this machine has
    # downloaded.
    if not any((Path(folder) / name).is_file() for name in FILES[:2]):
        raise SpecError(
            f"vision folder {quoted(folder)} has no {FILES[0]}. Give the folder of a model as "
            "Hugging Face publishes it; workers need the same path."
        )
    try:
        transformers: Any = importlib.import_module("transformers")
    except ImportError as error:
        raise SpecError(
            f"vision kind transformers needs that library, which cannot be imported: {cut(error)}. "
            "Ask who runs the service to install it, on the workers too."
        ) from error
    try:
        with named_folder(folder, FILES) as named:
            return transformers.AutoImageProcessor.from_pretrained(
                named, local_files_only=True, trust_remote_code=False
            )
    except MemoryError:
        raise  # told with the limit
    except Exception as error:  # whatever is wrong with the files, or missing for that processor
        raise SpecError(
            f"transformers {_release('transformers')} has no image processor for the vision folder "
            f"{quoted(folder)}: {cut(error)}. Code that lies in it is never run: name a class of "
            "your own by vision: {kind: custom}."
        ) from error


def _refuse_other_text(folder: str, image_processor: str) -> None:
    """Raises SpecError where the model's text has other tokens than those of the tiles."""
    names = [image_processor.removesuffix("Fast").removesuffix("Pil")]
    for file in FILES[:2]:
        with suppress(OSError, ValueError, KeyError, TypeError):
            names.append(str(json.loads(read_named(Path(folder) / file))["processor_class"]))
    for name in names:
        if (kind := OTHER_TEXT.get(name)) is not None:
            remedy = f"Write vision: {{kind: {kind}}}, which is built in." if kind else _INSTEAD
            raise SpecError(
                f"vision kind transformers counts the tokens of tiles; models of {quoted(name)} "
                "write other tokens between rows or tiles, or none for what pads a picture, so "
                f"that their tokens would be counted wrongly. {remedy}"
            )


def _require_fit(processor: Any, name: str) -> None:
    """Raises SpecError unless tiles follow from a picture's size, and a rank can do the processor's
    last steps."""
    noise = np.random.default_rng(0)
    for width, height in PROBES:
        picture = noise.integers(0, 256, (height, width, 3), dtype=np.uint8)
        try:
            tiles = _tiles_of(processor, name, picture)
            black = _tiles_of(processor, name, np.zeros_like(picture))
            whole = _as_tiles(processor(images=_shown(picture), return_tensors="np"), name)
        except SampleError as error:
            raise SpecError(f"vision kind transformers: {error}") from error
        except Exception as error:  # one that takes no picture alone, or not without normalising
            raise SpecError(
                f"vision kind transformers: {quoted(name)} fails on a picture of {width}×{height} "
                f"pixels with {type(error).__name__}: {cut(error)}. {_INSTEAD}"
            ) from error
        if tiles.shape != black.shape:
            raise SpecError(
                f"vision kind transformers: {quoted(name)} makes {list(tiles.shape)} of one "
                f"picture of {width}×{height} pixels and {list(black.shape)} of another. Steps "
                f"are planned from sizes alone. {_INSTEAD}"
            )
        difference = float(np.abs(_normalised(tiles, processor) - whole).max())
        if not difference <= NORMALISED:  # also where it is no number
            raise SpecError(
                f"vision kind transformers: {quoted(name)} does more behind resizing than (pixels "
                f"/ 255 − image_mean) / image_std, which is what ranks do: values differ by "
                f"{difference:.2g}. {_INSTEAD}"
            )


_OF_PATCHES = ("image_grid_thw", "target_sizes")  # beside pixel_values that are patches in a row
_INSTEAD = (
    "Use the kind of its family where it is built in, or a class of your own by vision: {kind: "
    "custom}."
)


def _tiles_of(processor: Any, name: str, picture: Pixels) -> Pixels:
    """uint8[tiles, height, width, 3] before rescaling and normalising."""
    made = processor(
        images=_shown(picture), do_rescale=False, do_normalize=False, return_tensors="np"
    )
    tiles = _as_tiles(made, name)
    if tiles.dtype != np.uint8:
        pixels = tiles.round()
        if not (np.abs(tiles - pixels).max() < 1e-3 and pixels.min() >= 0 and pixels.max() <= 255):
            raise SampleError(
                f"{quoted(name)} makes values in {tiles.min():.3g}..{tiles.max():.3g} of a picture "
                f"that it is told not to rescale; pixels are whole numbers in 0..255. {_INSTEAD}"
            )
        tiles = pixels.astype(np.uint8)
    return np.ascontiguousarray(tiles)


def _as_tiles(made: Any, name: str) -> NDArray[Any]:
    """What a processor gives as [tiles, height, width, 3]."""
    others = [
        key
        for key in made
        if (key != "pixel_values" and key.endswith("pixel_values")) or key in _OF_PATCHES
    ]
    values = np.asarray(made["pixel_values"])
    if others or values.ndim < 4 or values.shape[-3] != 3:
        raise SampleError(
            f"{quoted(name)} makes pixel_values {list(values.shape)}"
            f"{''.join(f' and {key}' for key in others)}; this takes pictures [..., 3, height, "
            f"width] alone, neither patches nor pictures of two sizes. {_INSTEAD}"
        )
    return values.reshape(-1, *values.shape[-3:]).transpose(0, 2, 3, 1)


def _shown(picture: Pixels) -> Any:
    from PIL import Image  # what reads a job file loads no codec

    return Image.fromarray(picture)


def _normalised(tiles: Pixels, processor: Any) -> NDArray[np.float32]:
    """As `trainer_client.features.normalize_pixels` does it."""
    normalises = getattr(processor, "do_normalize", False)
    mean = np.asarray(processor.image_mean if normalises else 0.0, np.float32)
    std = np.asarray(processor.image_std if normalises else 1.0, np.float32)
    return np.asarray((tiles / np.float32(255) - mean) / std, np.float32)


def _release(library: str) -> str:
    release = str(getattr(importlib.import_module(library), "__version__", "unknown"))
    return release.split("+")[0]  # builds for other accelerators do the same
