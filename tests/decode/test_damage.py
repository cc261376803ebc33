"""Damage inside a file that opens well, and what a job's options may not ask for."""

import io
import struct

import av
import numpy as np
import pytest

from dataservice.core.errors import SampleError, SpecError
from dataservice.core.limits import DEFAULT_LIMITS, DecodeLimits
from dataservice.core.sample import MediaBlob
from dataservice.decode.audio import audio_samples, decode_audio
from dataservice.decode.flac import plain_flac, read_plain
from dataservice.decode.media import MediaPipeline
from dataservice.decode.processors.base import View, VisionPlan
from dataservice.decode.processors.internvl import InternVLProcessor
from dataservice.decode.processors.llava import LlavaProcessor
from dataservice.decode.processors.qwen2_vl import Qwen2VLProcessor
from dataservice.decode.processors.whisper import WhisperProcessor
from dataservice.decode.sample_pipeline import build_pipeline
from dataservice.decode.tags import without_tags
from dataservice.decode.video import decode_video, read_clip


def decoded_audio(blob: MediaBlob):
    samples = audio_samples(blob, DEFAULT_LIMITS)
    return decode_audio(blob, samples, WhisperProcessor().plan(samples), DEFAULT_LIMITS)


def damaged(data: bytes, at: int, size: int = 40) -> bytes:
    return data[:at] + bytes(byte ^ 0x55 for byte in data[at : at + size]) + data[at + size :]


@pytest.mark.parametrize("rate_hz", [16_000, 22_050])
def test_a_flac_frame_whose_checksum_is_wrong_is_not_decoded_past(files, rate_hz):
    data = files.audio(4.0, rate_hz, container="flac", codec="flac")
    blob = files.blob("audio", data, "whole.flac")
    assert decoded_audio(blob)
    for at in (len(data) // 3, len(data) // 2):
        with pytest.raises(SampleError, match=r"'cut.flac' is truncated or damaged"):
            decoded_audio(files.blob("audio", damaged(data, at), "cut.flac"))


def test_what_a_flac_says_beside_its_sound_is_not_read(files):
    """A list of its tracks that no reader understands; a cover that is larger than the file."""
    plain = files.audio(2.0, container="flac", codec="flac")
    info, rest = b"fLaC" + bytes([plain[4] & 0x7F]) + plain[5:42], plain[42:]
    tracks, cover = b"\x05\0\1\x8c" + bytes(396), b"\x06\0\0\x20" + b"\xff" * 32
    blob = files.blob("audio", info + tracks + cover + rest)
    room = np.empty(32_000, np.float32)
    assert read_plain("some.flac", plain_flac(blob), room) == 32_000
    assert (room == decoded_audio(files.blob("audio", plain))[0]).all()


@pytest.mark.parametrize("change", ["missing", "repeated", "swapped"])
def test_frames_of_a_flac_may_not_be_missing_repeated_or_out_of_order(files, change):
    """Each is whole and has its right checksum; libFLAC would put silence where one is missing."""
    data = files.audio(2.0, container="flac", codec="flac")
    with av.open(io.BytesIO(data)) as opened:
        frames = [bytes(packet) for packet in opened.demux(audio=0) if packet.size]
    header = data.removesuffix(b"".join(frames))
    one, two, *rest = frames[8:]
    changed = {"missing": [two], "repeated": [one, one, two], "swapped": [two, one]}[change]
    blob = files.blob("audio", header + b"".join([*frames[:8], *changed, *rest]), "cut.flac")
    with pytest.raises(SampleError, match=r"'cut.flac' is truncated or damaged"):
        decoded_audio(blob)


@pytest.mark.parametrize("harm", [lambda end: end[:-30], lambda end: end[:-30] + bytes(30)])
def test_the_end_of_a_flac_may_not_be_missing_or_damaged(files, harm):
    """It is a tenth of a second, which other formats may lack: their headers are not exact."""
    data = files.audio(4.05, container="flac", codec="flac")
    assert decoded_audio(files.blob("audio", data))
    with pytest.raises(SampleError, match=r"'end.flac' is truncated or damaged"):
        decoded_audio(files.blob("audio", harm(data), "end.flac"))


@pytest.mark.parametrize("signals", [(1, 2), (2, 1)])
def test_a_recording_whose_channels_change_on_the_way_is_refused(files, signals):
    layouts = ("", "mono", "stereo")
    parts = [files.audio(2.0, 16_000, "adts", "aac", layouts[channels]) for channels in signals]
    assert decoded_audio(files.blob("audio", parts[0]))
    with pytest.raises(SampleError, match=r"'two.aac' is truncated or damaged"):
        decoded_audio(files.blob("audio", b"".join(parts), "two.aac"))


@pytest.mark.parametrize(
    ("container", "codec"),
    [("mp4", "libx264"), ("webm", "libvpx"), ("webm", "libvpx-vp9"), ("mp4", "mpeg4")],
)
def test_a_damaged_packet_is_not_painted_over(files, container, codec):
    """FFmpeg would show what it guesses; the clip must be refused, not trained on."""
    data = files.video(40, container=container, codec=codec, size=(160, 120))
    clip = read_clip(files.blob("video", data), DEFAULT_LIMITS)
    plan = VisionPlan(
        encoder_tokens=1,
        llm_tokens=1,
        views=(View.whole(28, 28),),
        frame_indices=tuple(range(clip.header.frames)),
    )
    assert decode_video(files.blob("video", data), clip, plan, DEFAULT_LIMITS).shape[0] == 40
    # Where frames lie: behind the header of an MP4, between head and index of a WebM.
    at = data.index(b"mdat") + 900 if container == "mp4" else len(data) // 2
    with pytest.raises(SampleError, match="truncated or damaged"):
        decode_video(files.blob("video", damaged(data, at, 60)), clip, plan, DEFAULT_LIMITS)


def id3(body: bytes) -> bytes:
    size = len(body)
    return b"ID3\4\0\0" + bytes(size >> shift & 0x7F for shift in (21, 14, 7, 0)) + body


@pytest.mark.parametrize(
    ("container", "codec", "rate"), [("mp3", "libmp3lame", 44_100), ("flac", "flac", 16_000)]
)
def test_tags_change_nothing(files, container, codec, rate):
    plain = without_tags(files.audio(2.0, rate, container, codec))
    tagged = id3(b"TIT2" + bytes(100)) + id3(b"APIC" + bytes(3000)) + plain
    assert without_tags(tagged) == plain
    blobs = [files.blob("audio", data) for data in (plain, tagged)]
    assert len({audio_samples(blob, DEFAULT_LIMITS) for blob in blobs}) == 1
    (first,), (second,) = map(decoded_audio, blobs)
    assert (first == second).all()


def test_chunks_of_tags_are_passed_over(files):
    plain = files.audio(1.0)
    tag = id3(b"TIT2" + bytes(100))
    chunk = b"id3 " + struct.pack("<I", len(tag)) + tag
    listed = b"LIST" + struct.pack("<I", 2**32 - 10) + b"INFOISFT" + bytes(20)
    tagged = plain[:12] + chunk + plain[12:]
    assert b"id3 " not in without_tags(tagged)
    assert audio_samples(files.blob("audio", tagged), DEFAULT_LIMITS) == 16_000
    assert b"LIST" not in without_tags(plain + listed)
    assert audio_samples(files.blob("audio", plain + listed), DEFAULT_LIMITS) == 16_000


# ---- options of a job ---------------------------------------------------------------------


@pytest.mark.parametrize("kind", [InternVLProcessor, LlavaProcessor])
def test_frames_beyond_counting_are_refused_with_the_job_file(kind):
    with pytest.raises(SpecError, match=r"video_frames is 1000000000000; it must be in 1\.\."):
        kind(video_frames=10**12)


def test_a_qwen_clip_has_a_bounded_number_of_frames():
    with pytest.raises(SpecError, match=r"video_max_frames 1000000; they must be in 2\.\."):
        Qwen2VLProcessor(video_max_frames=1_000_000)


def test_a_processor_that_enlarges_beyond_the_limits_is_refused(files):
    greedy = Qwen2VLProcessor(min_pixels=10**12, max_pixels=10**12)
    pipeline = MediaPipeline(vision=greedy, audio=None, limits=DEFAULT_LIMITS)
    with pytest.raises(SampleError, match=r"'some.image': resized, .* max_image_pixels"):
        pipeline.plan(files.blob("image", files.image(64, 48)))
    small = DecodeLimits(max_decoded_bytes=1000)
    pipeline = MediaPipeline(vision=Qwen2VLProcessor(), audio=None, limits=small)
    with pytest.raises(SampleError, match=r"'some.image': decoded, .* max_decoded_bytes is 1,000"):
        pipeline.plan(files.blob("image", files.image(64, 48)))


def test_the_files_of_a_sample_share_one_limit(kitchen, sample, files):
    image = files.blob("image", files.image(280, 280))  # 235,200 bytes decoded
    limits = DecodeLimits(max_decoded_bytes=500_000)
    pipeline = build_pipeline(kitchen.spec(), limits=limits)
    pipeline.measure(sample({"text": "the"}, image, image))
    with pytest.raises(SampleError, match=r"705,600; the limit max_decoded_bytes is 500,000"):
        pipeline.measure(sample({"text": "the"}, image, image, image))


def test_tokens_of_a_sample_are_limited_before_they_are_laid_out(kitchen, sample, files):
    pipeline = build_pipeline(kitchen.spec(), limits=DecodeLimits(max_llm_tokens=50))
    with pytest.raises(SampleError, match="max_llm_tokens is 50"):
        pipeline.measure(sample({"text": "the"}, files.blob("image", files.image(280, 280))))


def test_other_limits_make_an_index_stale_and_the_defaults_do_not(kitchen):
    usual = kitchen.pipeline().fingerprint
    assert build_pipeline(kitchen.spec(), limits=DecodeLimits()).fingerprint == usual
    other = build_pipeline(kitchen.spec(), limits=DecodeLimits(max_image_pixels=1000))
    assert other.fingerprint != usual


def test_limits_of_nothing_are_refused():
    with pytest.raises(SpecError, match=r"limits\.max_turns is 0; it must be above 0"):
        DecodeLimits(max_turns=0)
