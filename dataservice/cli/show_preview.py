"""What `dataservice preview` prints of a sample: text for a terminal, and data for programs. The
page is made in preview_page.py, which says the same in the same words."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.text import Text

from dataservice.core.sample import ItemLengths, MediaKind, Modality, SampleLocation
from dataservice.core.visible import visible

if TYPE_CHECKING:  # they load codecs
    from dataservice.jobs.preview import Medium, Piece, SamplePreview

KIND_WORDS: dict[MediaKind, str] = {"image": "image", "video": "clip", "audio": "recording"}
LEARNT = ("⟦", "⟧")
"""Around learnt text where there is no colour. In a sample's own text they are written as escapes,
so that no text can say that it is learnt."""
SHOWN_CHARS = 20_000  # of one sample's text, in a terminal; --out and --json have all
NAME_CHARS = 500  # of a key, or of a file's name
SOUND_HZ = 16_000
_UNMARKED = str.maketrans({mark: mark.encode("unicode_escape").decode() for mark in LEARNT})


def preview_text(preview: "SamplePreview", *, marks: bool) -> Iterator[Text]:
    """A sample's name and place, its lengths, its media, and its text as the tokens write it.
    Learnt text is green, and stands between LEARNT with `marks`."""
    yield Text(title(preview), style="bold")
    yield Text(place(preview.location))
    if preview.problem:
        yield Text(f"cannot be used: {preview.problem}", style="yellow")
        return
    yield Text(lengths_line(preview))
    for medium in preview.media:
        yield Text(medium_line(medium), style="cyan")
    yield _rendering(preview, marks)


def legend(*, marks: bool) -> Text:
    """How to read the text."""
    shown = "between " + " and ".join(LEARNT) if marks else "green"
    return Text(f"what is learnt (the tokens that carry loss) is {shown}\n", style="dim")


def _rendering(preview: "SamplePreview", marks: bool) -> Text:
    text, left = Text(), SHOWN_CHARS
    opening, closing = LEARNT if marks else ("", "")
    for piece in preview.pieces:
        if piece.medium is not None:
            text.append(placeholder(preview, piece), style="cyan")
            continue
        shown = piece.text[:left]
        left -= len(shown)
        shown = shown.translate(_UNMARKED) if marks else shown
        if piece.learnt and shown:
            text.append(f"{opening}{shown}{closing}", style="bold green")
        else:
            text.append(shown)
    hidden = sum(len(piece.text) for piece in preview.pieces) - (SHOWN_CHARS - left)
    if hidden:
        text.append(f"\n… (cut: {hidden:,} more characters; --out shows all)", style="yellow")
    return text.append("\n")


# ---- the words of both ----------------------------------------------------------------------


def title(preview: "SamplePreview") -> str:
    """The source, the key and, if known, the number of a sample."""
    number = "" if preview.number is None else f" (sample {preview.number:,} of its source)"
    return f"{name(preview.source, preview.key)}{number}"


def name(source: str, key: str) -> str:
    """A sample's name: its source and its key."""
    return f"{source}/{_one_line(key)}"


def place(location: SampleLocation) -> str:
    """The file of a sample and where in it the sample lies."""
    file = _one_line(location.file)
    piece = f", piece {location.piece} of the document" if location.piece else ""
    if location.row >= 0:
        return f"{file}, row {location.row} of row group {location.row_group}{piece}"
    if not location.spans:
        return f"{file}{piece}"
    start = min(span.offset_bytes for span in location.spans)
    end = max(span.offset_bytes + span.size_bytes for span in location.spans)
    names = _one_line(", ".join(span.name for span in location.spans))
    return f"{file}, bytes {start}-{end}: {names}{piece}"


def _one_line(name: str) -> str:
    """A name of a user's that can neither begin a line of its own nor fill the screen."""
    return visible(name, NAME_CHARS)


def lengths_line(preview: "SamplePreview") -> str:
    """LLM tokens, those that carry loss, their weight unless it is 1, what each encoder gets."""
    lengths = preview.lengths
    assert lengths is not None, "a sample without a problem has lengths"
    line = f"{lengths.llm_tokens:,} LLM tokens, {lengths.loss_tokens:,} of them learnt"
    if preview.loss_weight != 1:
        line += f" with loss weight {preview.loss_weight:g}"
    for modality, tokens in encoder_tokens(preview).items():
        line += f"; {tokens:,} {modality} encoder tokens"
    return line


def encoder_tokens(preview: "SamplePreview") -> dict[str, int]:
    """Encoder tokens by modality, of those that the sample has."""
    found: dict[str, int] = {}
    for item in preview.lengths.items if preview.lengths else ():
        name = Modality(item.modality).name.lower()
        found[name] = found.get(name, 0) + item.encoder_tokens
    return found


def medium_name(medium: "Medium") -> str:
    """`image 1`, `clip 2`."""
    return f"{KIND_WORDS[medium.kind]} {medium.number}"


def medium_line(medium: "Medium") -> str:
    """A file's name, what the encoder gets of it, and how many tokens it becomes."""
    augmented = ", augmented" if medium.before else ""
    return f"{medium_name(medium)} ({_one_line(medium.name)}): {_contents(medium)}{augmented}"


def _contents(medium: "Medium") -> str:
    tokens = f"{sum(item.llm_tokens for item in medium.items):,} tokens"
    if medium.kind == "audio":
        samples = sum(item.shape[0] for item in medium.items)
        return f"{samples / SOUND_HZ:.2f} s, {tokens}"
    _, height, width, _ = medium.items[0].shape
    frames = sum(item.shape[0] for item in medium.items)
    what = "frame" if medium.kind == "video" else "tile"
    many = f"{frames} {what}{'s' if frames > 1 else ''}"
    return f"{many} of {width}×{height} pixels, {tokens}"


def placeholder(preview: "SamplePreview", piece: "Piece") -> str:
    """What stands in the text for the tokens of an item: `[image 1: 12×16 patches, 48 tokens]`."""
    assert piece.medium is not None
    medium = preview.media[piece.medium]
    item = medium.items[piece.part]
    part = f", part {piece.part + 1} of {len(medium.items)}" if len(medium.items) > 1 else ""
    return f"[{medium_name(medium)}{part}: {_size(medium, item)}, {item.llm_tokens:,} tokens]"


def _size(medium: "Medium", item: ItemLengths) -> str:
    if medium.kind == "audio":
        return f"{item.shape[0] / SOUND_HZ:.2f} s"
    if item.grid is None:
        frames, height, width, _ = item.shape
        return f"{frames}×{height}×{width} pixels" if frames > 1 else f"{height}×{width} pixels"
    times, rows, columns, _ = item.grid
    return f"{times}×{rows}×{columns} patches" if times > 1 else f"{rows}×{columns} patches"


# ---- data -----------------------------------------------------------------------------------


def preview_fields(preview: "SamplePreview") -> dict[str, Any]:
    """The same as data, without pixels and sound."""
    lengths = preview.lengths
    return {
        "source": preview.source,
        "key": preview.key,
        "number": preview.number,
        "location": asdict(preview.location),
        "problem": preview.problem or None,
        "llm_tokens": lengths.llm_tokens if lengths else None,
        "loss_tokens": lengths.loss_tokens if lengths else None,
        "loss_weight": preview.loss_weight if lengths else None,
        "encoder_tokens": encoder_tokens(preview),
        "pieces": [asdict(piece) for piece in preview.pieces],
        "media": [
            {
                "kind": medium.kind,
                "number": medium.number,
                "name": medium.name,
                "augmented": bool(medium.before),
                "items": [asdict(item) for item in medium.items],
            }
            for medium in preview.media
        ],
    }
