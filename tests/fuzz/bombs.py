"""Small files that ask for much: each by the way in which it does."""

import io
import struct
import zlib
from functools import cache

import av
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from tests.decode.files import Files, written
from tests.fuzz.thrift_writer import varint


def chunk(kind: bytes, data: bytes) -> bytes:
    """A PNG chunk."""
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, *, more: bytes = b"", colour: int = 0, idat: bytes = b"") -> bytes:
    """A PNG that states this size; `more` chunks stand before its pixels."""
    header = struct.pack(">IIBBBBB", width, height, 8, colour, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + more
        + chunk(b"IDAT", idat or zlib.compress(b"\0" * 100))
        + chunk(b"IEND", b"")
    )


@cache
def deflated(size: int) -> bytes:
    """Zeros that unfold to `size` bytes."""
    packer, out = zlib.compressobj(9), []
    for _ in range(size // 2**20):
        out.append(packer.compress(bytes(2**20)))
    return b"".join([*out, packer.flush()])


def png_of_zeros(side: int) -> bytes:
    """A whole PNG of side × side RGBA pixels, in a thousandth of their size."""
    return png(side, side, colour=6, idat=deflated(side * (4 * side + 1) + 2**20))


def png_with_text(kind: bytes) -> bytes:
    """A picture of 8 × 8 whose text or colour profile unfolds to 96 MiB."""
    head = {b"zTXt": b"k\0\0", b"iTXt": b"k\0\1\0\0\0", b"iCCP": b"k\0\0"}[kind]
    return png(8, 8, more=chunk(kind, head + deflated(96 * 2**20)))


def jpeg_of_scans(scans: int) -> bytes:
    """A progressive JPEG of 65,500 × 250 pixels that goes over them again and again."""
    whole = Files.saved(Image.new("L", (16, 16)), "JPEG", progressive=True)
    at = whole.index(b"\xff\xc2")
    large = bytearray(whole)
    large[at + 5 : at + 9] = struct.pack(">HH", 250, 65_500)
    start = whole.rindex(b"\xff\xda")
    return bytes(large[:start]) + bytes(large[start:-2]) * scans + b"\xff\xd9"


def bmp_that_skips(width: int) -> bytes:
    """A run-length BMP of one line whose only code skips 255 lines."""
    palette = bytes(1024)
    data = bytes([0, 2, 255, 255]) * 10 + b"\0\1"
    header = struct.pack("<IiiHHIIiiII", 40, width, 1, 1, 8, 1, len(data), 0, 0, 256, 0)
    offset = 14 + len(header) + len(palette)
    return b"BM" + struct.pack("<IHHI", offset + len(data), 0, 0, offset) + header + palette + data


def gif(width: int, height: int) -> bytes:
    """One pixel on a screen of this size, followed by 50,000 frames."""
    frame = b"\x2c" + struct.pack("<HHHHB", 0, 0, 1, 1, 0) + b"\x02\x02\x44\x01\x00"
    return (
        b"GIF89a" + struct.pack("<HHBBB", width, height, 0x80, 0, 0) + bytes(6)
        + frame * 50_000 + b"\x3b"
    )  # fmt: skip


def gif_frame(width: int, height: int) -> bytes:
    """A screen of one pixel and a frame of this size, to be filled once it was shown."""
    control = b"\x21\xf9\x04\x09\0\0\0\0"
    frame = b"\x2c" + struct.pack("<HHHHB", 0, 0, width, height, 0) + b"\x02\x02\x44\x01\x00"
    return b"GIF89a" + struct.pack("<HHBBB", 1, 1, 0x80, 0, 0) + bytes(6) + control + frame + b";"


def webp_animation(frames: int) -> bytes:
    pictures = [Image.new("RGB", (64, 64), (k % 256, 0, 0)) for k in range(frames)]
    return Files.saved(pictures[0], "WEBP", save_all=True, append_images=pictures[1:])


def tiff_of_tags(tags: int) -> bytes:
    """A TIFF whose every tag claims the same half megabyte."""
    blob = bytes(2**19)
    entries = b"".join(
        struct.pack("<HHII", 40_000 + k % 25_000, 7, len(blob), 8) for k in range(tags)
    )
    folder = struct.pack("<H", min(tags, 65_535)) + entries + bytes(4)
    return b"II*\0" + struct.pack("<I", 8 + len(blob)) + blob + folder


def tiff_of_size(width: int, height: int, *, tile: int = 0) -> bytes:
    """An LZW TIFF that states this size, perhaps in tiles of `tile` pixels a side."""
    tags = [(256, 4, 1, width), (257, 4, 1, height), (258, 3, 1, 8), (259, 3, 1, 5),
            (262, 3, 1, 1), (277, 3, 1, 1)]  # fmt: skip
    strip = bytes([0x80, 0x00, 0x40, 0x40])
    where = 8 + 2 + 12 * (len(tags) + (4 if tile else 3)) + 4
    if tile:
        tags += [(322, 4, 1, tile), (323, 4, 1, tile), (324, 4, 1, where), (325, 4, 1, len(strip))]
    else:
        tags += [(273, 4, 1, where), (278, 4, 1, height), (279, 4, 1, len(strip))]
    folder = b"".join(struct.pack("<HHII", *tag) for tag in sorted(tags))
    return b"II*\0" + struct.pack("<IH", 8, len(tags)) + folder + bytes(4) + strip


def exif_of_tags() -> bytes:
    """A JPEG whose EXIF block has 20,000 tags of the same half megabyte."""
    exif = b"Exif\0\0" + tiff_of_tags(20_000)
    parts = [exif[k : k + 65_000] for k in range(0, len(exif), 65_000)]
    segments = b"".join(
        b"\xff\xe1" + struct.pack(">H", len(part) + 8) + (b"Exif\0\0" if k else b"") + part
        for k, part in enumerate(parts)
    ).replace(struct.pack(">H", len(parts[0]) + 8), struct.pack(">H", len(parts[0]) + 2), 1)
    whole = Files.image(32, 32)
    return whole[:2] + segments + whole[2:]


# ---- clips --------------------------------------------------------------------------------


def _edited(data: bytes, box: bytes, at: int, value: bytes, nth: int = 0) -> bytes:
    """Overwrite bytes of the content of the nth box of this type."""
    start = -1
    for _ in range(nth + 1):
        start = data.index(box, start + 1)
    out = bytearray(data)
    out[start + 4 + at : start + 4 + at + len(value)] = value
    return bytes(out)


def mp4_of_samples(samples: int) -> bytes:
    """An MP4 whose tables say: so many samples of one byte, all in one chunk."""
    data = Files.video(frames=8, container="mp4")
    data = _edited(data, b"stsz", 4, struct.pack(">II", 1, samples))
    data = _edited(data, b"stsc", 8, struct.pack(">II", 1, samples))
    return _edited(data, b"stts", 8, struct.pack(">I", samples))


def mp4_of_fragments(samples: int) -> bytes:
    """A fragment that states so many samples and describes none."""
    data = Files.video(frames=8, container="mp4", options={"movflags": "frag_keyframe+empty_moov"})
    return _edited(data, b"trun", 0, struct.pack(">II", 0, samples))


def mp4_of_edits(edits: int) -> bytes:
    """A clip that is played again and again by its edit list."""
    data = Files.video(frames=200, container="mp4", options={"movflags": "faststart"})
    start = data.index(b"edts") - 4
    old = struct.unpack(">I", data[start : start + 4])[0]
    entry = struct.pack(">IIHH", 1000, 0, 1, 0)
    elst = struct.pack(">I4sII", 16 + edits * 12, b"elst", 0, edits) + entry * edits
    new = struct.pack(">I4s", 8 + len(elst), b"edts") + elst
    grown = len(new) - old
    out = bytearray(data[:start] + new + data[start + old :])
    for box in (b"moov", b"trak"):
        at = out.index(box) - 4
        size = struct.unpack(">I", out[at : at + 4])[0]
        out[at : at + 4] = struct.pack(">I", size + grown)
    return bytes(out)


def mp4_compressed() -> bytes:
    """A header in a cmov box, which FFmpeg would inflate to the size that it states."""
    data = Files.video(frames=4, container="mp4")
    start = data.index(b"moov") - 4
    size = struct.unpack(">I", data[start : start + 4])[0]
    packed = zlib.compress(data[start : start + size])
    body = (
        struct.pack(">I4s4s", 12, b"dcom", b"zlib")
        + struct.pack(">I4sI", 12 + len(packed), b"cmvd", 2**31 - 1)
        + packed
    )
    cmov = struct.pack(">I4s", 8 + len(body), b"cmov") + body
    return data[:start] + struct.pack(">I4s", 8 + len(cmov), b"moov") + cmov + data[start + size :]


def mp4_of_no_rate() -> bytes:
    """All frames at the same instant, in a time base of zero."""
    data = Files.video(frames=8, container="mp4")
    data = _edited(data, b"mdhd", 12, struct.pack(">II", 0, 0))
    return _edited(data, b"stts", 12, struct.pack(">I", 0))


def pcm_mov() -> bytes:
    """A MOV of PCM sound whose tables say four billion samples in each of 4,000 chunks."""
    data = Files.audio(1.0, container="mov", codec="pcm_s16le")
    data = _edited(data, b"stsz", 8, struct.pack(">I", 0xFFFFFFFF))
    return _edited(data, b"stsc", 12, struct.pack(">I", 0x7FFFFFFF))


def video_that_grows(side: int, codec: str = "libvpx", container: str = "webm") -> bytes:
    """Frames of 64 × 48, then one of side × side, in a stream that promised the first."""
    small = Files.video(frames=8, container=container, codec=codec)
    large = Files.video(frames=3, size=(side, side), container=container, codec=codec)
    return _joined(small, large, container)


def _joined(first: bytes, second: bytes, container: str) -> bytes:
    with written(container, None) as (out, done), av.open(io.BytesIO(first)) as a:
        stream = out.add_stream_from_template(a.streams.video[0])
        last = 0
        for source in (first, second):
            with av.open(io.BytesIO(source)) as clip:
                base = last
                for packet in clip.demux(video=0):
                    if packet.dts is None:
                        continue
                    packet.pts, packet.dts = packet.pts + base, packet.dts + base
                    last = max(last, packet.dts + (packet.duration or 1))
                    packet.stream = stream
                    out.mux(packet)
    return done()


# ---- recordings ---------------------------------------------------------------------------


def id3_of_zeros() -> bytes:
    """An MP3 with a private ID3 frame that inflates to 200 MB, and is then written as text."""
    body = b"\x5f\x7f\x7f\x7f" + deflated(200 * 2**20)
    size = bytes(len(body) >> shift & 0x7F for shift in (21, 14, 7, 0))
    frame = b"PRIV" + size + b"\0\x09" + body
    size = bytes(len(frame) >> shift & 0x7F for shift in (21, 14, 7, 0))
    return b"ID3\4\0\0" + size + frame + Files.audio(0.5, 44_100, "mp3", "libmp3lame")


def wav_with_comment() -> bytes:
    """A RIFF comment that states four gigabytes."""
    plain = Files.audio(0.2)
    listed = b"LIST" + struct.pack("<I", 2**32 - 10) + b"INFOISFT" + struct.pack("<I", 2**32 - 60)
    return plain[:36] + listed + plain[36:]


def wav(*, rate: int = 16_000, channels: int = 1, seconds: float = 0.1, promised: int = 0) -> bytes:
    data = bytes(min(2 * int(rate * channels * seconds), 2**20))
    fmt = struct.pack(
        "<HHIIHH", 1, channels, rate, rate * channels * 2 % 2**32, channels * 2 % 2**16, 16
    )
    size = promised or len(data)
    return (
        b"RIFF" + struct.pack("<I", (36 + size) % 2**32) + b"WAVEfmt " + struct.pack("<I", 16) + fmt
        + b"data" + struct.pack("<I", size % 2**32) + data
    )  # fmt: skip


def flac_of(samples: int, rate: int = 16_000) -> bytes:
    """One second of FLAC whose header promises so many samples."""
    data = bytearray(Files.audio(1.0, container="flac", codec="flac"))
    packed = int.from_bytes(data[18:26]) & ~(2**36 - 1) & ~((2**20 - 1) << 44)
    data[18:26] = (packed | rate << 44 | samples).to_bytes(8)
    return bytes(data)


def flac_of_silence(minutes: int) -> bytes:
    """Silence at a kilobyte a minute."""
    with written("flac", None) as (out, done):
        stream = out.add_stream("flac", rate=16_000, layout="mono")
        block = av.AudioFrame.from_ndarray(
            np.zeros((1, 16_000 * 60), dtype=np.int16), format="s16", layout="mono"
        )
        block.sample_rate = 16_000
        for _ in range(minutes):
            block.pts = None
            out.mux(stream.encode(block))
        out.mux(stream.encode())
    return done()


# ---- archives and tables ------------------------------------------------------------------


def tar_header(
    name: bytes, size: int, kind: bytes = b"0", *, link: bytes = b"", data: bytes = b""
) -> bytes:
    """One member of a tar, its size as stated."""
    number = b"%011o\0" % size if size < 8**11 else b"\x80" + size.to_bytes(11)
    head = bytearray(
        name.ljust(100, b"\0") + b"0000644\0" * 3 + number + b"00000000000\0" + b" " * 8 + kind
        + link.ljust(100, b"\0") + b"ustar\00000"
    )  # fmt: skip
    head += bytes(512 - len(head))
    head[148:156] = b"%06o\0 " % sum(head)
    return bytes(head) + data + bytes(-len(data) % 512)


TAR_END = bytes(1024)


def tars() -> dict[str, bytes]:
    """Tars by what is hostile in them. Each holds the sample `good` too, where it can."""
    good = tar_header(b"good.txt", 2, data=b"ok")
    pax = b"30 path=" + b"x" * 21 + b"\n"
    sparse = b"22 GNU.sparse.major=1\n22 GNU.sparse.minor=0\n31 GNU.sparse.name=sparse.txt\n"
    return {
        "a long name of 8 GiB": good + tar_header(b"n", 8 * 2**30, b"L", data=b"a" * 2000),
        "a long name of a petabyte": good + tar_header(b"n", 2**50, b"L", data=b"a" * 2000),
        "a pax header of 8 GiB": good + tar_header(b"n", 8 * 2**30, b"x", data=pax),
        "a pax record of 8 GiB": good
        + tar_header(b"n", 600, b"x", data=(b"8589934592 path=abc\n").ljust(600, b"x")),
        "a member of 8 GiB": good + tar_header(b"a.jpg", 8 * 2**30, data=b"abc"),
        "a member of size below 0": good
        + tar_header(b"a.jpg", 0, data=b"").replace(b"00000000000\0", b"\xff" * 12, 1),
        "a sparse map that does not end": good
        + tar_header(b"n", len(sparse), b"x", data=sparse)
        + tar_header(b"a.txt", 512, data=b"1" * 512),
        "a chain of long names": good + tar_header(b"n", 4, b"L", data=b"abc\0") * 5000,
        "global headers without end": b"".join(
            tar_header(b"n", 20, b"g", data=b"20 key%05d=abcdefgh\n" % k) + good
            for k in range(3000)
        )
        + TAR_END,
        "a name that is no text": tar_header(b"b\xff\xfe.txt", 2, data=b"ok") + good + TAR_END,
        "a name that climbs": tar_header(b"../../etc/c.txt", 2, data=b"ok") + good + TAR_END,
        "an absolute name": tar_header(b"/etc/passwd.txt", 2, data=b"ok") + good + TAR_END,
        "a symbolic link": tar_header(b"d.txt", 0, b"2", link=b"/etc/passwd") + good + TAR_END,
        "a hard link": tar_header(b"d.txt", 0, b"1", link=b"good.txt") + good + TAR_END,
        "a device": tar_header(b"d.txt", 0, b"3") + good + TAR_END,
        "a pipe": tar_header(b"d.txt", 0, b"6") + good + TAR_END,
        "a member twice": good + good + TAR_END,
        "ten thousand members of one sample": b"".join(
            tar_header(b"m.%d.jpg" % k, 1, data=b"x") for k in range(10_000)
        )
        + good
        + TAR_END,
        "a record that nests": tar_header(b"d.json", 200_000, data=b'{"a":' * 40_000)
        + good
        + TAR_END,
        "a record of 20 MiB": tar_header(
            b"d.json", 20 * 2**20, data=b'{"text": "' + b" " * (20 * 2**20 - 12) + b'"}'
        )
        + good
        + TAR_END,
    }


def parquet(table: pa.Table, **options: object) -> bytes:
    buffer = io.BytesIO()
    pq.write_table(table, buffer, compression="zstd", **options)
    return buffer.getvalue()


def parquet_that_aborts() -> bytes:
    """A column of texts whose type says FLOAT: Arrow's object for it throws where nothing in
    Python can catch it."""
    data = parquet(pa.table({"text": ["some", "words"]}))
    start = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    # Field 1 of the schema's element and of the column: BYTE_ARRAY becomes FLOAT.
    return data[:start] + data[start:].replace(b"\x15\x0c", b"\x15\x08")


def parquets() -> dict[str, bytes]:
    """Parquet files of kilobytes by what unfolds in them."""
    pages = pa.table({"text": pa.array(["x" * 2**20], pa.string()).take(pa.array([0] * 300))})
    large = parquet(pages, use_dictionary=False, row_group_size=1000)
    (real,) = {pq.read_metadata(io.BytesIO(large)).row_group(0).column(0).total_uncompressed_size}
    claim = varint(real)
    one = pa.array(["y" * (50 * 2**20)], pa.large_string())
    shared = pa.DictionaryArray.from_arrays(pa.array([0] * 500, pa.int32()), one)
    huge = pa.DictionaryArray.from_arrays(
        pa.array([0] * 500, pa.int32()), pa.array(["y" * (100 * 2**20)], pa.large_string())
    )
    images = pa.StructArray.from_arrays(
        [
            pa.DictionaryArray.from_arrays(
                pa.array([0] * 6, pa.int32()), pa.array([bytes(50 * 2**20)], pa.large_binary())
            )
        ],
        ["bytes"],
    )
    many = pa.ListArray.from_arrays(
        pa.array([0, 20_000_000], pa.int32()), pa.nulls(20_000_000, pa.string())
    )
    wide = pa.ListArray.from_arrays(
        pa.array([0, 3_000_000], pa.int32()), pa.nulls(3_000_000, pa.string())
    )
    prefixes = pa.array(["z" * 2**20 + str(k) for k in range(40)])
    lists = pa.ListArray.from_arrays(pa.array([0, 40], pa.int32()), prefixes)
    nested = pa.array([["a"]])
    for _ in range(60):
        nested = pa.ListArray.from_arrays(pa.array([0, 1], pa.int32()), nested)
    return {
        "a page of 300 MiB": large,
        "a page of 300 MiB that the footer denies": large.replace(
            claim, b"\x80" * (len(claim) - 1) + b"\0"
        ),
        "a text of 100 MiB that 500 rows share": parquet(pa.table({"text": huge})),
        "a text of 50 MiB that 500 rows share": parquet(pa.table({"text": shared})),
        "a picture of 50 MiB that 6 rows share": parquet(pa.table({"image": images})),
        "a list of 20 million": parquet(pa.table({"messages": many})),
        "a list of 3 million": parquet(pa.table({"messages": wide})),
        "texts that share their beginning": parquet(
            pa.table({"text": prefixes}),
            use_dictionary=False,
            column_encoding={"text": "DELTA_BYTE_ARRAY"},
        ),
        "lists of texts that share their beginning": parquet(
            pa.table({"messages": lists}),
            use_dictionary=False,
            column_encoding={"messages.list.element": "DELTA_BYTE_ARRAY"},
        ),
        "lists in lists": parquet(pa.table({"messages": nested})),
        "texts that state to be numbers": parquet_that_aborts(),
    }


def arrow(table: pa.Table) -> bytes:
    buffer = io.BytesIO()
    with pa.ipc.new_stream(buffer, table.schema) as writer:
        writer.write_table(table)
    return buffer.getvalue()


def arrows() -> dict[str, bytes]:
    """Arrow files of kilobytes: values that take no bytes, and deep nests."""

    def nothings(count: int) -> pa.Array:
        return pa.ListArray.from_arrays(pa.array([0, count], pa.int32()), pa.nulls(count))

    nested = pa.array([["a"]])
    for _ in range(60):
        nested = pa.ListArray.from_arrays(pa.array([0, 1], pa.int32()), nested)
    return {
        "a list of 20 million": arrow(pa.table({"messages": nothings(20_000_000)})),
        "a list of 16 million": arrow(pa.table({"messages": nothings(16_000_000)})),
        "20 million rows": arrow(pa.table({"text": pa.nulls(20_000_000)})),
        "lists in lists": arrow(pa.table({"messages": nested})),
    }
