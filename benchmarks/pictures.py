"""What a picture costs beside Pillow: `python -m benchmarks.pictures --out FILE`, half a minute.

JPEGs are decoded and resized by the service, and by Pillow alone (open, convert, `resize` by the
bicubic filter, bytes); and the decoded picture is only resized, by both. All take turns in one run;
figures are milliseconds of the processor, the best of several.
"""

import argparse
import io
from pathlib import Path

import numpy as np
import PIL
from PIL import Image

from benchmarks.harness import hardware, publish, side_by_side
from dataservice.core.limits import DEFAULT_LIMITS
from dataservice.core.sample import MediaBlob
from dataservice.decode.image import cut_views, decode_image
from dataservice.decode.processors.base import View, VisionPlan

# (width, height) → (width, height)
SIZES = [
    ((1500, 1000), (1232, 812)),
    ((640, 480), (896, 448)),
    ((500, 375), (504, 364)),
    ((4000, 3000), (1148, 868)),
    ((3000, 2000), (448, 448)),
]


def photograph(width: int, height: int, seed: int = 0) -> bytes:
    """A JPEG of soft shapes under noise."""
    rng = np.random.default_rng(seed)
    soft = Image.fromarray(rng.integers(0, 256, (height // 16, width // 16, 3), np.uint8))
    pixels = np.asarray(soft.resize((width, height), Image.Resampling.BICUBIC)).astype(int)
    pixels += rng.integers(-8, 9, pixels.shape)
    buffer = io.BytesIO()
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(buffer, "JPEG", quality=90)
    return buffer.getvalue()


def row(size: tuple[int, int], shown: tuple[int, int], repeats: int) -> str:
    """One line of the table."""
    data = photograph(*size)
    blob, view = MediaBlob(kind="image", name="picture", data=data), View.whole(*shown)
    plan = VisionPlan(encoder_tokens=1, llm_tokens=1, views=(view,))
    picture = Image.open(io.BytesIO(data)).convert("RGB")

    def by_pillow(image: Image.Image) -> object:
        return np.asarray(image.resize(shown, Image.Resampling.BICUBIC))

    best = side_by_side(
        {
            "ours": lambda: decode_image(blob, plan, DEFAULT_LIMITS),
            "pillow": lambda: by_pillow(Image.open(io.BytesIO(data)).convert("RGB")),
            "our resize": lambda: cut_views(picture, [view]),
            "pillow's resize": lambda: by_pillow(picture),
        },
        repeats=repeats,
        most_s=10.0,
    )
    ours, pillow, our_resize, its_resize = (1000 * each.processor_s for each in best.values())
    return (
        f"| {size[0]} × {size[1]} | {shown[0]} × {shown[1]} | {our_resize:.1f} | {its_resize:.1f} "
        f"| {our_resize / its_resize:.2f} | {ours:.1f} | {pillow:.1f} | {ours / pillow:.2f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="write the table to this file too")
    parser.add_argument("--repeats", type=int, default=15)
    given = parser.parse_args()
    lines = [
        "# Pictures: milliseconds of the processor, beside Pillow",
        "",
        f"`python -m benchmarks.pictures` on {hardware()}; Pillow {PIL.__version__}.",
        "",
        "| JPEG | shown | our resize | Pillow's | ratio | JPEG to pixels | with Pillow | ratio |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for size, shown in SIZES:
        lines.append(row(size, shown, given.repeats))
        print(lines[-1], flush=True)
    text = "\n".join(lines) + "\n"
    publish(text, given.out)


if __name__ == "__main__":
    main()
