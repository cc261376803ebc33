"""Previews as one HTML page that needs nothing else: no script, no address, no file beside it.

Whatever a sample says is text: escaped, with what does not print written out. The page's own policy
forbids scripts and requests besides.
"""

import base64
import html
import io
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from dataservice.cli.show_preview import (
    SOUND_HZ,
    lengths_line,
    medium_line,
    place,
    placeholder,
    title,
)
from dataservice.core.sample import ItemArray
from dataservice.core.visible import LINE_BREAKS, visible
from dataservice.jobs.preview import Medium, Piece, SamplePreview

MOST_TILES = 64  # of one image that are shown
MOST_FRAMES = 16  # of one clip that are shown, spread over it
_WAVE_WIDTH, _WAVE_HEIGHT = 600, 60
_ESCAPE_CHARS = 10  # the most that one character becomes when it is written out
_HEAD = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>{title}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem;
  color: #1a1a1a; background: #fff; }}
section {{ border-top: 1px solid #ccc; padding: 1rem 0 2rem; }}
h2 {{ font-size: 1.1rem; margin: 0; overflow-wrap: anywhere; }}
p {{ margin: .2rem 0; color: #555; overflow-wrap: anywhere; }}
.problem {{ color: #a33; white-space: pre-wrap; }}
.text {{ white-space: pre-wrap; overflow-wrap: anywhere; font-family: ui-monospace, monospace;
  background: #f6f6f6; padding: .8rem; margin-top: .8rem; }}
mark {{ background: #bfe8c4; }}
.medium {{ background: #cfe3ff; }}
figure {{ margin: .8rem 0; }}
figure img {{ max-width: 100%; margin: 2px; vertical-align: top; }}
.clip img {{ max-width: 11rem; }}
svg {{ background: #f6f6f6; max-width: 100%; }}
</style>
</head>
<body>
<h1>{title}</h1>
<p><mark>Marked text</mark> is learnt: its tokens carry loss. Pictures, frames and sound are what
the encoders get.</p>
"""
_FOOT = "</body>\n</html>\n"


def page(job: str, previews: Iterable[SamplePreview]) -> Iterator[str]:
    """The page, a sample at a time: only one sample's pictures are in memory."""
    yield _HEAD.format(title=_escaped(f"Samples of {job}"))
    for preview in previews:
        yield "".join(_section(preview))
    yield _FOOT


def _section(preview: SamplePreview) -> Iterator[str]:
    where = _escaped(place(preview.location))
    yield f"<section>\n<h2>{_escaped(title(preview))}</h2>\n<p>{where}</p>\n"
    if preview.problem:
        yield f'<p class="problem">cannot be used: {_escaped(preview.problem)}</p>\n</section>\n'
        return
    yield f"<p>{_escaped(lengths_line(preview))}</p>\n"
    for medium in preview.media:
        yield _figure(medium)
    pieces = "".join(_piece(preview, piece) for piece in preview.pieces)
    yield f'<div class="text">{pieces}</div>\n</section>\n'


def _piece(preview: SamplePreview, piece: Piece) -> str:
    if piece.medium is not None:
        return f'<span class="medium">{_escaped(placeholder(preview, piece))}</span>'
    text = _escaped(piece.text)
    return f"<mark>{text}</mark>" if piece.learnt else text


def _figure(medium: Medium) -> str:
    said, shown = medium_line(medium), _shown(medium, medium.arrays)
    if medium.before:
        said += "; below it what it was"
        shown += f"<br>{_shown(medium, medium.before)}"
    if medium.kind != "audio":
        pictures = sum(len(array) for array in medium.arrays)
        chosen = _chosen(medium, pictures)
        if len(chosen) < pictures:
            said += f"; {len(chosen)} of {pictures} are shown"
    kind = "clip" if medium.kind == "video" else medium.kind
    caption = f"<figcaption>{_escaped(said)}</figcaption>"
    return f'<figure class="{kind}">{shown}{caption}</figure>\n'


def _shown(medium: Medium, arrays: Sequence[ItemArray]) -> str:
    if medium.kind == "audio":
        return _wave(np.concatenate(arrays))
    pictures = [picture for array in arrays for picture in array]
    return "".join(_picture(pictures[k], k + 1) for k in _chosen(medium, len(pictures)))


def _chosen(medium: Medium, pictures: int) -> list[int]:
    """The pictures of a file that are shown."""
    return _spread(pictures, MOST_FRAMES if medium.kind == "video" else MOST_TILES)


def _spread(count: int, most: int) -> list[int]:
    """At most so many of the places 0 .. count-1, evenly spread, the first and last included."""
    return [round(place) for place in np.linspace(0, count - 1, min(count, most)).tolist()]


def _picture(pixels: NDArray[np.uint8], number: int) -> str:
    """uint8[height, width, 3] as a PNG in the page, bit for bit."""
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    data = base64.b64encode(buffer.getvalue()).decode()
    return f'<img alt="{number}" title="{number}" src="data:image/png;base64,{data}">'


def _wave(sound: NDArray[np.float32]) -> str:
    """float32[samples] as the outline of its loudest and quietest values over time. Full scale is
    from -1 to 1; what is above is cut."""
    starts = np.linspace(0, len(sound), min(len(sound), _WAVE_WIDTH), endpoint=False).astype(int)
    high, low = np.maximum.reduceat(sound, starts), np.minimum.reduceat(sound, starts)
    x = starts * _WAVE_WIDTH / len(sound)
    both = np.concatenate([np.stack([x, high], 1), np.stack([x, low], 1)[::-1]])
    y = (1 - np.clip(np.nan_to_num(both[:, 1]), -1, 1)) * _WAVE_HEIGHT / 2
    points = " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(both[:, 0], y, strict=True))
    return (
        f'<svg width="{_WAVE_WIDTH}" height="{_WAVE_HEIGHT}" role="img" '
        f'aria-label="wave form of {len(sound) / SOUND_HZ:.2f} s">'
        f'<polygon points="{points}" fill="#3a7bd5" stroke="#3a7bd5" stroke-width="0.5"/></svg>'
    )


def _escaped(text: str) -> str:
    return html.escape(visible(text, _ESCAPE_CHARS * len(text) + 1, keep=LINE_BREAKS))
