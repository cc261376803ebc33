"""Small whole files of every kind that is read, to be damaged."""

import io
import json
from functools import cache

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from tests.decode.files import Files
from tests.fuzz.bombs import TAR_END, tar_header
from tests.sources.mds_writer import files_in_list, pixels, shard

# Some containers give each file a number of its own: a seed would choose other damage each time.
SAME = {"fflags": "+bitexact"}


@cache
def images() -> tuple[bytes, ...]:
    """Every format, with palettes, transparency, depths, interlacing, frames and EXIF."""
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 255, (40, 56, 3), dtype=np.uint8))
    clear = noise.convert("RGBA")
    clear.putalpha(90)
    exif = Image.Exif()
    exif[0x0112] = 6
    deep = Image.fromarray(np.arange(40 * 56, dtype=np.uint16).reshape(40, 56))
    frames = [noise.transpose(Image.Transpose.ROTATE_180), noise.convert("L").convert("RGB")]
    return (
        Files.saved(noise, "JPEG", exif=exif),
        Files.saved(noise, "JPEG", progressive=True, subsampling=2),
        Files.saved(noise.convert("CMYK"), "JPEG"),
        Files.saved(noise.convert("L"), "JPEG", icc_profile=bytes(200)),
        Files.saved(noise, "PNG"),
        Files.saved(clear, "PNG", exif=exif),
        Files.saved(noise.quantize(16), "PNG", transparency=3, bits=4),
        Files.saved(deep, "PNG"),
        Files.saved(noise, "PNG", save_all=True, append_images=frames),
        Files.saved(noise, "GIF", save_all=True, append_images=frames),
        Files.saved(noise.quantize(8), "GIF", transparency=1, interlace=1),
        Files.saved(noise, "WEBP", exif=exif),
        Files.saved(clear, "WEBP", lossless=True),
        Files.saved(noise, "WEBP", save_all=True, append_images=frames),
        Files.saved(noise, "BMP"),
        Files.saved(noise.quantize(16), "BMP"),
        Files.saved(noise, "TIFF", compression="tiff_lzw"),
        Files.saved(noise, "TIFF", compression="jpeg"),
        Files.saved(noise.convert("1"), "TIFF", compression="group4"),
        Files.saved(deep, "TIFF", compression="tiff_deflate"),
        Files.saved(noise, "AVIF", exif=exif),
        Files.saved(clear, "AVIF"),
    )


@cache
def videos() -> tuple[bytes, ...]:
    """The codecs and containers that this build of FFmpeg can write."""
    fragmented = {"movflags": "frag_keyframe+empty_moov"}
    return (
        Files.video(12),
        Files.video(12, options={"movflags": "faststart"}),
        Files.video(12, options=fragmented),
        Files.video(8, codec="mpeg4"),
        Files.video(8, codec="libx265"),
        Files.video(12, container="webm", codec="libvpx-vp9", options=SAME),
        Files.video(12, container="webm", codec="libvpx", options=SAME),
        Files.video(12, container="matroska", codec="libx264", options=SAME),
        Files.video(8, container="avi", codec="mpeg4"),
        Files.video(8, container="mpegts", codec="libx264"),
        Files.video(8, container="mov", codec="mpeg4"),
    )


@cache
def recordings() -> tuple[bytes, ...]:
    """The same for sound, in mono and stereo and at several rates."""
    return (
        Files.audio(0.5),
        Files.audio(0.3, 44_100, layout="stereo"),
        Files.audio(0.5, codec="pcm_f32le"),
        Files.audio(0.5, container="flac", codec="flac"),
        Files.audio(0.3, 44_100, "flac", "flac", "stereo"),
        Files.audio(0.5, 44_100, "mp3", "libmp3lame"),
        Files.audio(0.5, 48_000, "ogg", "libopus", options=SAME),
        Files.audio(0.5, codec="pcm_mulaw"),
        Files.audio(0.5, codec="adpcm_ima_wav"),
        Files.audio(0.5, 48_000, "webm", "libopus", "stereo", SAME),
        Files.audio(0.5, 44_100, "mp4", "aac"),
        Files.audio(0.5, 44_100, "adts", "aac"),
        Files.audio(0.3, container="mov", codec="pcm_s16le"),
    )


@cache
def tars() -> tuple[bytes, ...]:
    """Plain ones, long names in both dialects, and a sparse member."""
    long = b"long/" * 30 + b"name.txt"
    pax = b"%d path=" % (len(long) + 10) + long + b"\n"
    picture = Files.image(32, 32, "PNG")
    record = json.dumps({"text": "<image> a", "id": "one"}).encode()
    plain = b"".join(
        tar_header(name, len(data), data=data)
        for name, data in (
            (b"a.json", record),
            (b"a.png", picture),
            (b"b.txt", b"some words"),
            (b"c.1.txt", b"other words"),
        )
    )
    return (
        plain + TAR_END,
        tar_header(b"n", len(long) + 1, b"L", data=long + b"\0")
        + tar_header(b"short.txt", 4, data=b"text")
        + plain
        + TAR_END,
        tar_header(b"n", len(pax), b"x", data=pax)
        + tar_header(b"short.txt", 4, data=b"text")
        + tar_header(b"g", 20, b"g", data=b"20 comment=abcdefgh\n")
        + plain
        + TAR_END,
        plain
        + tar_header(b"n", 22, b"x", data=b"22 GNU.sparse.major=1\n")
        + tar_header(b"d.txt", 512, b"S", data=b"1\n0\n10\n".ljust(512, b"\0"))
        + TAR_END,
    )


@cache
def tar_of_media() -> bytes:
    """A sample of each kind of media."""
    members = (
        (b"a.jpg", Files.image(32, 32)),
        (b"a.txt", b"<image> a"),
        (b"b.mp4", Files.video(8)),
        (b"b.txt", b"<video> b"),
        (b"c.flac", Files.audio(0.3, container="flac", codec="flac")),
        (b"c.txt", b"<audio> c"),
    )
    return b"".join(tar_header(name, len(data), data=data) for name, data in members) + TAR_END


def _rows_with_pictures() -> pa.Table:
    picture = Files.image(24, 24, "PNG")
    return pa.table(
        {
            "id": [f"row-{k}" for k in range(6)],
            "image": [{"bytes": picture, "path": f"{k}.png"} for k in range(6)],
            "messages": [
                [{"role": "user", "content": "<image> hi"}, {"role": "assistant", "content": "yes"}]
            ]
            * 6,
            "score": [0.5, None, 1.0, float("nan"), -1.0, 2.0],
        }
    )


def _rows_of_text() -> pa.Table:
    return pa.table({"text": [f"words {k} " * 20 for k in range(40)], "n": list(range(40))})


@cache
def parquets() -> tuple[bytes, ...]:
    """Pictures and conversations under several codecs, page versions and encodings."""
    table, texts = _rows_with_pictures(), _rows_of_text()

    def saved(table: pa.Table, **options: object) -> bytes:
        buffer = io.BytesIO()
        pq.write_table(table, buffer, **options)
        return buffer.getvalue()

    return (
        saved(table, compression="snappy", row_group_size=3),
        saved(table, compression="zstd", data_page_version="2.0", use_dictionary=False),
        saved(table, compression="none", write_page_checksum=True),
        saved(texts, compression="gzip", row_group_size=20),
        saved(texts, compression="brotli", use_dictionary=["text"]),
        saved(texts, compression="lz4", write_statistics=False),
        saved(
            texts,
            use_dictionary=False,
            column_encoding={"text": "DELTA_BYTE_ARRAY", "n": "DELTA_BINARY_PACKED"},
        ),
        saved(
            texts,
            use_dictionary=False,
            column_encoding={"text": "DELTA_LENGTH_BYTE_ARRAY", "n": "BYTE_STREAM_SPLIT"},
        ),
    )


@cache
def arrows() -> tuple[bytes, ...]:
    """The same rows as Arrow streams and files, with nulls, lists and numbers."""

    def saved(table: pa.Table, *, file: bool = False, rows: int = 20) -> bytes:
        buffer = io.BytesIO()
        with (pa.ipc.new_file if file else pa.ipc.new_stream)(buffer, table.schema) as writer:
            writer.write_table(table, max_chunksize=rows)
        return buffer.getvalue()

    table, texts = _rows_with_pictures(), _rows_of_text()
    return (
        saved(table, rows=3),
        saved(table, file=True),
        saved(texts),
        saved(texts.append_column("on", pa.array([True, None] * 20)), file=True, rows=7),
    )


@cache
def mds_shards() -> tuple[bytes, ...]:
    """Shards of most encodings, and of text alone."""
    picture = Files.image(24, 24, "PNG")
    columns = {"text": "str", "image": "png", "more": "list[png]", "n": "int", "notes": "json"}
    pixels_of = pixels(4, 3, "RGB", bytes(range(36)))
    sample = {"image": picture, "n": b"8 bytes!", "notes": b'{"a": [1, "b"]}'}
    counts = [{"text": b"<image>" * (1 + k), "more": files_in_list(*[picture] * k)} for k in (0, 2)]
    return (
        shard(columns, [sample | each for each in counts] * 2),
        shard({"text": "str", "it": "pil"}, [{"text": b"<image> a", "it": pixels_of}] * 3),
        shard({"text": "str", "f": "float32"}, [{"text": b"words " * 9, "f": b"4 by"}] * 20),
    )


@cache
def lines() -> tuple[bytes, ...]:
    """JSONL of every dialect, without media files."""
    records = [
        {"id": "a", "text": "some words"},
        {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]},
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
        {"text": "é 😀 \u0000", "image": "../../etc/passwd"},
        {"id": 7, "text": "x" * 300, "tools": [{"name": {"deep": [1, [2, [3]]]}}]},
    ]
    return (
        b"".join(json.dumps(record).encode() + b"\n" for record in records),
        b"\n".join(json.dumps(record, ensure_ascii=False).encode() for record in records),
    )


def good_lines() -> tuple[bytes, ...]:
    """The same without the line that is no sample."""
    return tuple(
        each.replace(b'"image": "../../etc/passwd"', b'"other": "value"') for each in lines()
    )
