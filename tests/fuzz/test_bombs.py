"""Small files that unfold to gigabytes are refused by the name of a limit, before they do.

Each case runs in a process whose peak memory is measured. Where the largest that is allowed is
decoded too, the limits are below the defaults, and the caps on memory with them.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from dataservice.core.limits import DecodeLimits
from tests.fuzz import bombs
from tests.fuzz.lab import MIB, Outcome, run_cases
from tests.fuzz.tasks import media

pytestmark = pytest.mark.long

PEAK_LIMIT_BYTES = 500 * MIB
# What the largest that is allowed may take: of a picture with transparency, of a text.
BYTES_PER_PIXEL = 9.5
BYTES_PER_TEXT_BYTE = 320

Wanted = str | None


def judge(
    wanted: Mapping[str, Wanted],
    outcomes: Sequence[Outcome],
    peaks: Mapping[str, int] | None = None,
) -> None:
    """Every case took little memory, and was refused with these words, or fine for None."""
    wrong = []
    for (name, words), outcome in zip(wanted.items(), outcomes, strict=True):
        peak_limit = (peaks or {}).get(name, PEAK_LIMIT_BYTES)
        good = (
            outcome.verdict == "fine"
            if words is None
            else outcome.verdict == "refused" and words in outcome.said
        )
        if not good or outcome.peak_bytes > peak_limit:
            wrong.append(
                f"{name}: {outcome.verdict}, {outcome.peak_bytes >> 20} MiB: {outcome.said}"
            )
    assert not wrong, "\n".join(wrong)


def test_pictures_that_unfold_are_refused_before_they_take_memory() -> None:
    limits = DecodeLimits(max_image_pixels=2**24)
    cases: dict[str, tuple[bytes, Wanted]] = {
        # What the first picture of a process loads, codecs and kernels, is no picture's memory.
        "a usual picture": (bombs.png_of_zeros(64), None),
        "a size beyond counting": (bombs.png(2**31 - 1, 2**31 - 1), "max_image_pixels"),
        "400 million pixels": (bombs.png(20_000, 20_000), "max_image_pixels"),
        "a line of 10 million": (bombs.png(10_000_000, 1), "max_image_side"),
        "the largest allowed": (bombs.png_of_zeros(2**12), None),
        "a text of 96 MiB": (bombs.png_with_text(b"zTXt"), "too large"),
        "an international text": (bombs.png_with_text(b"iTXt"), "too large"),
        "a colour profile": (bombs.png_with_text(b"iCCP"), "too large"),
        "20,000 scans": (bombs.jpeg_of_scans(20_000), "max_image_scans"),
        "EXIF tags that overlap": (bombs.exif_of_tags(), None),
        "a BMP that skips lines": (bombs.bmp_that_skips(10_000_000), "max_image_side"),
        "a GIF screen": (bombs.gif(65_535, 65_535), "max_image_pixels"),
        "50,000 GIF frames": (bombs.gif(64, 64), None),
        "a GIF frame that is disposed of": (bombs.gif_frame(65_535, 65_535), "max_image_pixels"),
        "a WebP animation": (bombs.webp_animation(500), None),
        "TIFF tags that overlap": (bombs.tiff_of_tags(20_000), "no header of a known format"),
        "a TIFF without its data": (bombs.tiff_of_size(4000, 4000), "cannot be decoded"),
        "a TIFF tile": (bombs.tiff_of_size(64, 64, tile=30_000), "one tile"),
    }
    files = [("image", data) for data, _ in cases.values()]
    outcomes = run_cases("tests.fuzz.tasks:media", files, setting=limits)
    words = {name: words for name, (_, words) in cases.items()}
    largest_bytes = int(limits.max_image_pixels * BYTES_PER_PIXEL)
    judge(words, outcomes, {"the largest allowed": largest_bytes})


def test_clips_that_unfold_are_refused_before_they_take_memory() -> None:
    limits = DecodeLimits(max_video_pixels=1024 * 1024)
    cases: dict[str, tuple[bytes, Wanted]] = {
        "150 million samples": (bombs.mp4_of_samples(150_000_000), "max_media_packets"),
        "3 million samples": (bombs.mp4_of_samples(3_000_000), "max_video_frames"),
        "a fragment of 150 million": (bombs.mp4_of_fragments(150_000_000), "max_media_packets"),
        "200,000 edits": (bombs.mp4_of_edits(200_000), "max_media_packets"),
        "15,000 edits": (bombs.mp4_of_edits(15_000), "truncated or damaged"),
        "a compressed header": (bombs.mp4_compressed(), "cmov"),
        "frames that grow": (bombs.video_that_grows(1040), "truncated or damaged"),
        "large frames": (bombs.Files.video(1, size=(1040, 1040)), "max_video_pixels"),
        "large frames in a stream": (
            bombs.Files.video(1, size=(1040, 1040), container="mpegts"),
            "max_video_pixels",
        ),
        "a rate of 0": (bombs.mp4_of_no_rate(), None),
    }
    files = [("video", data) for data, _ in cases.values()]
    outcomes = run_cases("tests.fuzz.tasks:media", files, setting=limits)
    judge({name: words for name, (_, words) in cases.items()}, outcomes)


def test_recordings_that_unfold_are_refused_before_they_take_memory() -> None:
    limits = DecodeLimits(max_audio_s=3600.0)
    cases: dict[str, tuple[bytes, Wanted]] = {
        "four billion samples": (bombs.pcm_mov(), "max_media_packets"),
        "a header of 50 days": (bombs.flac_of(2**36 - 1), "max_audio_s"),
        "a header of an hour": (bombs.flac_of(16_000 * 3600), "even silence takes"),
        "a rate of 1": (bombs.flac_of(3000, rate=1), "truncated or damaged"),
        "an hour of silence": (bombs.flac_of_silence(60), None),
        "more of silence": (bombs.flac_of_silence(61), "max_audio_s"),
        "an ID3 frame of zeros": (bombs.id3_of_zeros(), None),
        "a comment of 4 GiB": (bombs.wav_with_comment(), "cannot be read"),
        "four billion a second": (bombs.wav(rate=4_000_000_000, seconds=1e-4), "cannot be read"),
        "two million a second": (bombs.wav(rate=2_000_000, seconds=1), "max_audio_rate_hz"),
        "the highest rate": (bombs.wav(rate=768_000), None),
        "no rate": (bombs.wav(rate=0, seconds=1), "cannot be read"),
        "no channels": (bombs.wav(channels=0, seconds=1, promised=1000), "0 channels"),
        "60,000 channels": (bombs.wav(channels=60_000, seconds=1), "channels"),
        "100 channels": (bombs.wav(channels=100, seconds=1), "max_audio_channels"),
    }
    files = [("audio", data) for data, _ in cases.values()]
    outcomes = run_cases("tests.fuzz.tasks:media", files, setting=limits)
    judge({name: words for name, (_, words) in cases.items()}, outcomes)


def test_records_that_unfold_are_refused_before_they_take_memory() -> None:
    deep: object = "a"
    for _ in range(90):
        deep = [deep]
    limits = DecodeLimits(max_text_bytes=2**19)
    most = limits.max_text_bytes - 100
    turns = [{"role": ("user", "assistant")[k % 2], "content": "x"} for k in range(3000)]
    half = chr(0xD800)
    cases: dict[str, tuple[dict[str, object], Wanted]] = {
        "the longest text": ({"text": "hello world " * (most // 12)}, None),
        "a longer text": ({"text": "a" * (most + 100)}, "max_text_bytes"),
        "as long in other letters": ({"text": "é" * (most // 2 + 100)}, "max_text_bytes"),
        "control tokens": ({"text": "<|im_end|>" * (most // 20)}, None),
        "placeholders": ({"text": "<image>" * 50_000}, "50000 placeholders"),
        "nesting": ({"text": "a", "x": deep}, "max_record_depth"),
        "nesting in JSON": (
            {"messages": '[{"role": "u", "x": ' + "[" * 99 + "]" * 99 + ', "content": "a"}]'},
            "max_record_depth",
        ),
        "nesting beyond JSON": ({"messages": "[" * 100_000}, "not JSON"),
        "turns": ({"messages": turns}, "max_turns"),
        "tools": ({"messages": turns[:2], "tools": ["a" * most] * 8}, "tools"),
        "half a surrogate pair": ({"text": f"a{half}"}, "surrogate"),
        "half a surrogate pair as a role": (
            {"messages": [{"role": half, "content": "a"}]},
            "surrogate",
        ),
        "half a surrogate pair as a key": ({half: "a"}, "needs messages"),
    }  # fmt: skip
    records = [record for record, _ in cases.values()]
    outcomes = run_cases("tests.fuzz.tasks:record", records, setting=limits)
    words = {name: words for name, (_, words) in cases.items()}
    judge(words, outcomes, dict.fromkeys(cases, limits.max_text_bytes * BYTES_PER_TEXT_BYTE))


def written(folder: Path, suffix: str, files: Mapping[str, bytes]) -> list[Path]:
    paths = [folder / f"{place:02}.{suffix}" for place in range(len(files))]
    for path, data in zip(paths, files.values(), strict=True):
        path.write_bytes(data)
    return paths


def test_hostile_tars_are_refused_before_they_take_memory(tmp_path: Path) -> None:
    wanted: dict[str, Wanted] = {
        "a long name of 8 GiB": "max_header_bytes",
        "a long name of a petabyte": "max_header_bytes",
        "a pax header of 8 GiB": "max_header_bytes",
        "a pax record of 8 GiB": "truncated",
        "a member of 8 GiB": "truncated",
        "a member of size below 0": "damaged",
        "a sparse map that does not end": "truncated",
        "a chain of long names": "recursion",
        "global headers without end": "global headers",
        "a name that is no text": None,
        "a name that climbs": None,
        "an absolute name": None,
        "a symbolic link": "'d.txt' is a link",
        "a hard link": "'d.txt' is a link",
        "a device": "special file",
        "a pipe": "special file",
        "a member twice": "occurs twice",
        "ten thousand members of one sample": "max_media_items",
        "a record that nests": "not valid JSON",
        "a record of 20 MiB": "max_record_bytes",
    }
    tars = bombs.tars()
    assert list(tars) == list(wanted)
    paths = written(tmp_path, "tar", tars)
    judge(wanted, run_cases("tests.fuzz.tasks:source", paths, setting=("webdataset", None)))


def test_parquet_files_that_unfold_are_refused_before_they_take_memory(tmp_path: Path) -> None:
    """The last was found by the campaign: Arrow ends the process over it, where our own reading
    of the footer only fails."""
    wanted: dict[str, Wanted] = {
        "a page of 300 MiB": "max_page_bytes",
        "a page of 300 MiB that the footer denies": "max_page_bytes",
        "a text of 100 MiB that 500 rows share": "max_page_bytes",
        "a text of 50 MiB that 500 rows share": "max_record_bytes",
        "a picture of 50 MiB that 6 rows share": None,
        "a list of 20 million": "max_row_group_values",
        "a list of 3 million": "max_record_bytes",
        "texts that share their beginning": None,
        "lists of texts that share their beginning": "DELTA_BYTE_ARRAY",
        "lists in lists": "nested",
        "texts that state to be numbers": "Parquet",
    }
    files = bombs.parquets()
    assert list(files) == list(wanted)
    assert max(map(len, files.values())) < 100_000
    paths = written(tmp_path, "parquet", files)
    judge(wanted, run_cases("tests.fuzz.tasks:source", paths, setting=("parquet", None)))


def test_arrow_files_that_unfold_are_refused_before_they_take_memory(tmp_path: Path) -> None:
    wanted: dict[str, Wanted] = {
        "a list of 20 million": "max_row_group_values",
        "a list of 16 million": "max_record_bytes",
        "20 million rows": "max_row_group_values",
        "lists in lists": None,  # as deep as Arrow writes them
    }
    files = bombs.arrows()
    assert list(files) == list(wanted)
    assert max(map(len, files.values())) < 100_000
    paths = written(tmp_path, "arrow", files)
    judge(wanted, run_cases("tests.fuzz.tasks:source", paths, setting=("arrow", None)))


def test_limits_are_those_that_the_operator_sets() -> None:
    picture = ("image", bombs.Files.image(100, 100, "PNG"))
    assert media(None)(picture) is None
    refusal = media(DecodeLimits(max_image_pixels=9999))(picture)
    assert refusal is not None
    assert "max_image_pixels is 9,999" in refusal


def test_the_lab_sees_what_it_is_there_to_see() -> None:
    """A crash, a hang and a hoard of memory are told from each other, and what follows goes on."""
    cases = ["", "crash", "", "hang", "", "hoard", ""]
    outcomes = run_cases("tests.fuzz.misbehaving:misbehaving", cases, cpu_limit_s=2.0)
    verdicts = [outcome.verdict for outcome in outcomes]
    assert verdicts == ["fine", "crashed", "fine", "hung", "fine", "fine", "fine"]
    assert [outcome.peak_bytes > 100 * MIB for outcome in outcomes].index(True) == 5
