"""Images, clips and recordings: what headers say and what decoding gives."""

import gc
import threading
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
from PIL import Image

from dataservice.core.errors import SampleError
from dataservice.core.limits import DEFAULT_LIMITS, DecodeLimits
from dataservice.core.sample import MediaBlob
from dataservice.decode.audio import TOLERATED_SAMPLES, audio_samples, decode_audio
from dataservice.decode.image import cut_tiles, decode_image, image_size
from dataservice.decode.media import MediaPipeline
from dataservice.decode.processors.base import View, VisionPlan
from dataservice.decode.processors.internvl import InternVLProcessor
from dataservice.decode.processors.llava import LlavaProcessor
from dataservice.decode.processors.qwen2_vl import Qwen2VLProcessor
from dataservice.decode.processors.whisper import WhisperProcessor
from dataservice.decode.video import decode_video, read_clip
from tests.decode.files import written

ORIENTATION = 0x0112


def whole(width: int, height: int) -> VisionPlan:
    return VisionPlan(encoder_tokens=1, llm_tokens=1, views=(View.whole(width, height),))


def picked(width: int, height: int, *indices: int) -> VisionPlan:
    return VisionPlan(
        encoder_tokens=1,
        llm_tokens=1,
        views=(View.whole(width, height),),
        frame_indices=indices,
    )


# ---- images -------------------------------------------------------------------------------


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF"])
def test_every_image_format_has_its_size_and_its_colours(files, format):
    blob = files.blob("image", files.image(128, 96, format))
    assert image_size(blob, DEFAULT_LIMITS) == (128, 96)
    pixels = decode_image(blob, whole(64, 48), DEFAULT_LIMITS)
    assert pixels.shape == (1, 48, 64, 3)
    assert pixels.dtype == np.uint8
    # Red grows to the right, green downwards.
    assert pixels[0, 24, 60, 0] > pixels[0, 24, 4, 0] + 150
    assert pixels[0, 44, 32, 1] > pixels[0, 4, 32, 1] + 150


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_counts_in_size_and_in_pixels(files, orientation):
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    blob = files.blob("image", files.image(96, 32, "JPEG", exif=exif, quality=95))
    width, height = image_size(blob, DEFAULT_LIMITS)
    assert (width, height) == ((96, 32) if orientation < 5 else (32, 96))
    pixels = decode_image(blob, whole(width, height), DEFAULT_LIMITS)[0].astype(int)
    # Where the stored corner of least red and green lies once the picture stands upright.
    dark = {1: (0, 0), 2: (0, 1), 3: (1, 1), 4: (1, 0), 5: (0, 0), 6: (0, 1), 7: (1, 1), 8: (1, 0)}
    corners = {(r, c): pixels[-r, -c, :2].sum() for r in (0, 1) for c in (0, 1)}
    assert min(corners, key=corners.__getitem__) == dark[orientation]


def test_a_damaged_exif_block_is_no_reason_to_lose_a_picture(files):
    blob = files.blob("image", files.image(40, 30, "JPEG", exif=b"Exif\0\0rubbish"))
    assert image_size(blob, DEFAULT_LIMITS) == (40, 30)


def test_nothing_of_a_picture_stays_when_its_tiles_are_made(files):
    blob = files.blob("image", files.image(64, 48, "PNG"))

    def pictures() -> int:
        return sum(issubclass(type(each), Image.Image) for each in gc.get_objects())

    gc.collect()
    gc.disable()  # what only a collection would free counts as memory of the next pictures
    try:
        before = pictures()
        decode_image(blob, whole(32, 24), DEFAULT_LIMITS)
        assert pictures() <= before
    finally:
        gc.enable()


def test_transparency_is_shown_on_white(files):
    clear = Image.new("RGBA", (32, 32), (200, 0, 0, 0))
    palette = Image.new("P", (32, 32), 0)
    palette.putpalette([10, 20, 30] + [0] * 765)
    palette.info["transparency"] = 0
    for picture in (clear, palette):
        blob = files.blob("image", files.saved(picture, "PNG"))
        assert (decode_image(blob, whole(32, 32), DEFAULT_LIMITS) == 255).all()


def test_grey_deep_and_palette_pictures_become_rgb(files):
    deep = Image.fromarray(np.full((16, 16), 40_000, dtype=np.uint16))
    for picture, level in [
        (Image.new("L", (16, 16), 90), 90),
        (Image.new("LA", (16, 16), (90, 255)), 90),
        (Image.new("1", (16, 16), 1), 255),
        (deep, 40_000 >> 8),
    ]:
        blob = files.blob("image", files.saved(picture, "PNG"))
        assert (decode_image(blob, whole(16, 16), DEFAULT_LIMITS) == level).all()


def test_an_animation_shows_its_first_frame(files):
    first, second = Image.new("RGB", (20, 20), "red"), Image.new("RGB", (20, 20), "blue")
    data = files.saved(first, "GIF", save_all=True, append_images=[second])
    pixels = decode_image(files.blob("image", data), whole(20, 20), DEFAULT_LIMITS)
    assert tuple(pixels[0, 10, 10]) == (255, 0, 0)


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "GIF"])
def test_a_truncated_image_is_reported_by_name(files, format):
    data = files.image(200, 200, format)
    blob = files.blob("image", data[: len(data) // 2], "000042.img")
    if format != "WEBP":  # whose reader looks at the whole file at once
        assert image_size(blob, DEFAULT_LIMITS) == (200, 200)
    with pytest.raises(SampleError, match=r"'000042.img'.*cannot be decoded.*Replace"):
        decode_image(blob, whole(200, 200), DEFAULT_LIMITS)


@pytest.mark.parametrize("data", [b"not an image", b"%!PS-Adobe-3.0 EPSF-3.0\n"])
def test_what_is_no_image_is_reported_with_what_can_be_read(files, data):
    with pytest.raises(SampleError, match="readable are JPEG"):
        image_size(files.blob("image", data), DEFAULT_LIMITS)


def test_too_many_pixels_are_refused_by_the_name_of_the_limit(files):
    blob = files.blob("image", files.image(100, 100, "PNG"))
    with pytest.raises(SampleError, match=r"10,000; the limit max_image_pixels is 9,999"):
        image_size(blob, DecodeLimits(max_image_pixels=9_999))


@pytest.mark.filterwarnings("default::PIL.Image.DecompressionBombWarning")
def test_a_decompression_bomb_is_refused_from_its_header(files):
    blob = files.blob("image", files.saved(Image.new("1", (16_000, 16_000)), "PNG"))
    with pytest.raises(SampleError, match="max_image_pixels"):
        image_size(blob, DEFAULT_LIMITS)


def test_tiles_outside_the_picture_are_filled():
    view = View(
        width=4, height=2, tile_width=4, tile_height=4, origins=((0, -1), (2, 0)), fill=(7, 8, 9)
    )
    first, second = tiles = np.zeros((2, 4, 4, 3), np.uint8)
    cut_tiles(np.full((2, 4, 3), 200, dtype=np.uint8), view, tiles)
    assert (first[0] == (7, 8, 9)).all()
    assert (first[3] == (7, 8, 9)).all()
    assert (first[1:3] == 200).all()
    assert (second[:2, :2] == 200).all()
    assert (second[:, 2:] == (7, 8, 9)).all()


def test_internvl_tiles_join_to_the_picture_and_the_thumbnail_shows_all(files):
    blob = files.blob("image", files.image(900, 900, "PNG"))
    tiles = decode_image(
        blob, InternVLProcessor().plan_image(width=900, height=900), DEFAULT_LIMITS
    )
    assert tiles.shape == (5, 448, 448, 3)
    joined = np.vstack([np.hstack(tiles[0:2]), np.hstack(tiles[2:4])])
    assert (np.diff(joined[448, :, 0].astype(int)) >= -2).all()
    assert np.abs(joined[::2, ::2].astype(int) - tiles[4].astype(int)).mean() < 3


def test_llava_pads_with_clips_mean_colour(files):
    blob = files.blob("image", files.image(400, 100, "PNG"))
    plan = LlavaProcessor(aspect="pad").plan_image(width=400, height=100)
    pixels = decode_image(blob, plan, DEFAULT_LIMITS)
    assert (pixels[0, [0, 335]] == (122, 116, 104)).all()
    assert pixels[0, 168, 330, 0] > 200


# ---- video --------------------------------------------------------------------------------

CONTAINERS = [("mp4", "libx264"), ("matroska", "libx264"), ("webm", "libvpx-vp9")]


@pytest.mark.parametrize(("container", "codec"), CONTAINERS)
def test_a_clips_header_tells_size_frames_and_rate(files, container, codec):
    blob = files.blob("video", files.video(23, 10, (64, 48), container, codec))
    header = read_clip(blob, DEFAULT_LIMITS).header
    assert (header.width, header.height, header.frames) == (64, 48, 23)
    assert header.frames_per_s == pytest.approx(10, rel=0.01)


@pytest.mark.parametrize(("container", "codec"), CONTAINERS)
def test_the_wanted_frames_are_decoded_in_order(files, container, codec):
    blob = files.blob("video", files.video(20, 10, (64, 48), container, codec))
    clip = read_clip(blob, DEFAULT_LIMITS)
    plan = picked(56, 28, 0, 3, 3, 12, 19)
    pixels = decode_video(blob, clip, plan, DEFAULT_LIMITS)
    assert pixels.shape == (5, 28, 56, 3)
    levels = pixels.reshape(5, -1).mean(axis=1)
    assert np.abs(levels - np.array([0, 30, 30, 120, 190])).max() < 6


def test_a_clip_is_decoded_in_the_thread_that_asks(files):
    """Workers decode many samples at once: threads of a codec's own would only hand over to one
    another, which on a busy machine takes longer than decoding."""

    def threads():
        return {task.name for task in Path("/proc/self/task").iterdir()}

    def look():
        while not done.is_set():
            seen.update(threads())

    blob = files.blob("video", files.video(20, 10, (256, 192)))
    clip, plan = read_clip(blob, DEFAULT_LIMITS), picked(128, 96, *range(20))
    seen, done, looking = set(), threading.Event(), threading.Thread(target=look)
    looking.start()
    before = threads()
    for _ in range(20):
        decode_video(blob, clip, plan, DEFAULT_LIMITS)
    done.set()
    looking.join()
    assert seen <= before


@pytest.mark.parametrize("share", [0.6, 0.93])
def test_a_truncated_mp4_is_refused_when_measured_with_its_frames(files, share):
    data = files.video(200, 10, (128, 96), options={"movflags": "faststart"})
    blob = files.blob("video", data[: int(len(data) * share)], "000003.mp4")
    with pytest.raises(
        SampleError,
        match=r"'000003.mp4' is truncated or damaged: its header promises 200 frames and \d+ "
        "are there",
    ):
        read_clip(blob, DEFAULT_LIMITS)


@pytest.mark.parametrize(("container", "codec"), [*CONTAINERS, ("avi", "mpeg4")])
def test_a_clip_cut_in_half_is_refused_when_measured(files, container, codec):
    data = files.video(60, 10, (64, 48), container, codec)
    blob = files.blob("video", data[: len(data) // 2], "half")
    with pytest.raises(SampleError, match=r"'half'.*(truncated|cut off|cannot be read)"):
        read_clip(blob, DEFAULT_LIMITS)


def beside_sound(container: str, codecs: tuple[str, str], begin_s: float, clip_s: float) -> bytes:
    """A clip of a file that has 10 s of sound."""
    with written(container, None) as (out, done):
        clip = out.add_stream(codecs[0], rate=10)
        clip.width, clip.height, clip.pix_fmt = 64, 48, "yuv420p"
        heard = out.add_stream(codecs[1], rate=48_000, layout="mono")
        packets = []
        for k in range(round(10 * clip_s)):
            grey = np.full((48, 64, 3), 2 * k, np.uint8)
            frame = av.VideoFrame.from_ndarray(grey, format="rgb24")
            frame.pts, frame.time_base = round(10 * begin_s) + k, Fraction(1, 10)
            packets += clip.encode(frame)
        noise = np.random.default_rng(0).integers(-9000, 9000, (1, 480_000), np.int16)
        sound = av.AudioFrame.from_ndarray(noise, format="s16", layout="mono")
        sound.sample_rate, sound.pts = 48_000, 0
        packets += [*clip.encode(), *heard.encode(sound), *heard.encode()]
        for packet in sorted(packets, key=lambda packet: packet.dts * packet.time_base):
            out.mux(packet)
    return done()


@pytest.mark.parametrize(("begin_s", "clip_s"), [(4, 6), (0, 4)])
@pytest.mark.parametrize(
    ("container", "codecs"),
    [
        ("matroska", ("libx264", "aac")),
        ("webm", ("libvpx", "libopus")),
        ("flv", ("libx264", "aac")),
    ],
)
def test_a_clip_may_begin_later_or_end_sooner_than_its_sound(container, codecs, begin_s, clip_s):
    data = beside_sound(container, codecs, begin_s, clip_s)
    blob = MediaBlob(kind="video", name="whole", data=data)
    assert read_clip(blob, DEFAULT_LIMITS).header.frames == 10 * clip_s
    half = replace(blob, name="half", data=data[: len(data) // 2])
    with pytest.raises(SampleError, match="'half' is truncated or damaged"):
        read_clip(half, DEFAULT_LIMITS)


def test_the_last_frame_stands_in_for_the_few_that_containers_overcount(files):
    blob = files.blob("video", files.video(20, 10))
    clip = read_clip(blob, DEFAULT_LIMITS)
    more = replace(clip, header=replace(clip.header, frames=22))
    pixels = decode_video(blob, more, picked(28, 28, 0, 21), DEFAULT_LIMITS)
    assert abs(int(pixels[1].mean()) - 190) < 6


@pytest.mark.parametrize(
    "limits",
    [
        DecodeLimits(max_video_frames=19),
        DecodeLimits(max_video_s=1.9),
        DecodeLimits(max_video_pixels=3000),
    ],
)
def test_clips_above_a_limit_are_refused_by_its_name(files, limits):
    blob = files.blob("video", files.video(20, 10))
    with pytest.raises(SampleError, match="the limit max_video_"):
        read_clip(blob, limits)


def test_a_recording_is_no_clip(files):
    with pytest.raises(SampleError, match="no video stream"):
        read_clip(files.blob("video", files.audio()), DEFAULT_LIMITS)


def test_an_animation_is_no_clip_and_the_formats_of_clips_are_named(files):
    with pytest.raises(SampleError, match=r"cannot be read: .*Readable are mov, mp4, "):
        read_clip(files.blob("video", files.image(8, 8, "GIF")), DEFAULT_LIMITS)


# ---- audio --------------------------------------------------------------------------------

CODECS = [
    ("wav", "pcm_s16le", 16_000, "mono"),
    ("wav", "pcm_s16le", 44_100, "stereo"),
    ("flac", "flac", 22_050, "stereo"),
    ("mp3", "libmp3lame", 24_000, "mono"),
    ("mp3", "libmp3lame", 44_100, "stereo"),
    ("ogg", "libopus", 48_000, "mono"),
    ("ipod", "aac", 44_100, "mono"),
    ("adts", "aac", 44_100, "mono"),
]


@pytest.mark.parametrize(("container", "codec", "rate", "layout"), CODECS)
@pytest.mark.parametrize("seconds", [0.4, 3.37])
def test_a_recording_decodes_to_the_length_of_its_header(
    files, container, codec, rate, layout, seconds
):
    blob = files.blob("audio", files.audio(seconds, rate, container, codec, layout))
    samples = audio_samples(blob, DEFAULT_LIMITS)
    assert samples / 16_000 == pytest.approx(seconds, abs=0.1)
    chunks = WhisperProcessor().plan(samples)
    (sound,) = decode_audio(blob, samples, chunks, DEFAULT_LIMITS)
    assert sound.shape == (chunks[0].samples,)
    assert sound.dtype == np.float32
    # A tone of half of full scale, 440 Hz.
    middle = sound[len(sound) // 4 : len(sound) * 3 // 4]
    assert 0.3 < np.sqrt(2) * middle.std() < 0.6
    spectrum = np.abs(np.fft.rfft(middle * np.hanning(len(middle))))
    assert np.argmax(spectrum) * 16_000 / len(middle) == pytest.approx(440, abs=8)


@pytest.mark.parametrize(
    ("container", "codec", "rate"),
    [
        ("mp3", "libmp3lame", 8_000),
        ("mp3", "libmp3lame", 11_025),
        ("mp3", "libmp3lame", 16_000),
        ("matroska", "aac", 8_000),
    ],
)
def test_what_a_codec_adds_at_a_low_rate_is_no_damage(files, container, codec, rate):
    for seconds in (0.51, 1.0, 3.37):
        blob = files.blob("audio", files.audio(seconds, rate, container, codec))
        samples = audio_samples(blob, DEFAULT_LIMITS)
        assert samples / 16_000 == pytest.approx(seconds, abs=TOLERATED_SAMPLES / rate)
        chunks = WhisperProcessor().plan(samples)
        (sound,) = decode_audio(blob, samples, chunks, DEFAULT_LIMITS)
        assert sound[round(seconds * 16_000) - 1600 :].any()


def test_a_recording_of_a_telephone_is_measured_by_its_packets(files):
    """FFmpeg takes the length of AMR from the size of the file and a bit rate that it guesses."""
    blob = files.blob("audio", files.audio(20.0, 8_000, "amr", "amr_nb"))
    samples = audio_samples(blob, DEFAULT_LIMITS)
    assert samples / 16_000 == pytest.approx(20.0, abs=0.1)
    chunks = WhisperProcessor().plan(samples)
    assert len(decode_audio(blob, samples, chunks, DEFAULT_LIMITS)) == 1


@pytest.mark.parametrize(
    ("container", "codecs"),
    [("matroska", ("libx264", "aac")), ("webm", ("libvpx", "libopus"))],
)
def test_sound_may_end_sooner_than_the_clip_beside_it(container, codecs):
    data = beside_sound(container, codecs, begin_s=0, clip_s=11)
    blob = MediaBlob(kind="audio", name="whole", data=data)
    samples = audio_samples(blob, DEFAULT_LIMITS)
    assert samples / 16_000 == pytest.approx(10, abs=0.1)
    chunks = WhisperProcessor().plan(samples)
    assert len(decode_audio(blob, samples, chunks, DEFAULT_LIMITS)) == 1
    half = replace(blob, name="half", data=data[: len(data) // 2])
    promised = audio_samples(half, DEFAULT_LIMITS)
    with pytest.raises(SampleError, match="'half' is truncated or damaged"):
        decode_audio(half, promised, WhisperProcessor().plan(promised), DEFAULT_LIMITS)


def test_an_mp3_without_an_index_is_measured_by_its_packets(files):
    data = files.audio(4.0, 44_100, "mp3", "libmp3lame")
    name = b"Info" if b"Info" in data else b"Xing"
    blob = files.blob("audio", data.replace(name, b"\0\0\0\0"))
    samples = audio_samples(blob, DEFAULT_LIMITS)
    assert samples / 16_000 == pytest.approx(4.0, abs=0.1)
    chunks = WhisperProcessor().plan(samples)
    assert len(decode_audio(blob, samples, chunks, DEFAULT_LIMITS)) == 1


def test_a_long_recording_becomes_chunks_that_join_to_it(files):
    blob = files.blob("audio", files.audio(2.5))
    samples = audio_samples(blob, DEFAULT_LIMITS)
    seconds = WhisperProcessor(chunk_s=1.0).plan(samples)
    pieces = decode_audio(blob, samples, seconds, DEFAULT_LIMITS)
    assert [len(piece) for piece in pieces] == [16_000, 16_000, 8_000]
    (sound,) = decode_audio(blob, samples, WhisperProcessor().plan(samples), DEFAULT_LIMITS)
    assert (np.concatenate(pieces) == sound).all()


@pytest.mark.parametrize(("container", "codec"), [("ipod", "aac"), ("flac", "flac")])
def test_a_truncated_recording_is_reported_with_both_lengths(files, container, codec):
    data = files.audio(4.0, 16_000, container, codec, options={"movflags": "faststart"})
    blob = files.blob("audio", data[: len(data) // 2], "000009.wav")
    samples = audio_samples(blob, DEFAULT_LIMITS)
    with pytest.raises(SampleError, match=r"'000009.wav' is truncated.*promises 4.0"):
        decode_audio(blob, samples, WhisperProcessor().plan(samples), DEFAULT_LIMITS)


def test_a_wav_that_was_cut_off_is_refused_when_it_is_measured(files):
    data = files.audio(4.0, 16_000, "wav", "pcm_s16le")
    blob = files.blob("audio", data[: len(data) // 2], "half.wav")
    with pytest.raises(SampleError, match=r"'half.wav' is truncated.*promises 4.00 s and 2.00 s"):
        audio_samples(blob, DEFAULT_LIMITS)


def test_a_wav_that_lacks_less_than_is_tolerated_is_as_long_as_its_bytes(files):
    data = files.audio(4.0, 16_000, "wav", "pcm_s16le")
    assert audio_samples(files.blob("audio", data[:-2000]), DEFAULT_LIMITS) == 63_000


@pytest.mark.parametrize("size", [0, 0x7FFF_F024, 0xFFFF_FFFF])
def test_a_wav_that_was_written_to_a_pipe_is_as_long_as_its_bytes(files, size):
    data = files.audio(2.5, 16_000, "wav", "pcm_s16le")
    at = data.index(b"data") + 4
    streamed = data[:at] + size.to_bytes(4, "little") + data[at + 4 :]
    assert audio_samples(files.blob("audio", streamed), DEFAULT_LIMITS) == 40_000


def test_noise_that_is_no_file_is_reported(files):
    for kind, read in (("audio", audio_samples), ("video", read_clip)):
        with pytest.raises(SampleError, match=r"cannot be read|no (audio|video) stream"):
            read(files.blob(kind, bytes(range(256)) * 8), DEFAULT_LIMITS)


@pytest.mark.parametrize(
    "data",
    [
        b"ffconcat version 1.0\nfile 'other.mp4'\n",
        b"#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\nhttp://127.0.0.1:9/a.ts\n",
    ],
)
def test_playlists_that_name_other_files_are_not_followed(files, data):
    with pytest.raises(SampleError, match="cannot be read"):
        read_clip(files.blob("video", data), DEFAULT_LIMITS)


def test_long_recordings_are_refused_by_the_name_of_the_limit(files):
    with pytest.raises(SampleError, match=r"2; the limit max_audio_s is 1"):
        audio_samples(files.blob("audio", files.audio(2.0)), DecodeLimits(max_audio_s=1))


# ---- one front door -----------------------------------------------------------------------


def test_media_without_a_processor_say_which_to_add(files):
    pipeline = MediaPipeline(vision=None, audio=None, limits=DEFAULT_LIMITS)
    with pytest.raises(SampleError, match=r"needs a processor of vision.*qwen2_vl"):
        pipeline.plan(files.blob("image", files.image()))
    with pytest.raises(SampleError, match=r"needs a processor of audio.*whisper"):
        pipeline.plan(files.blob("audio", files.audio()))


def test_empty_and_oversize_files_are_refused_before_they_are_opened(files):
    pipeline = MediaPipeline(
        vision=Qwen2VLProcessor(), audio=None, limits=DecodeLimits(max_media_bytes=100)
    )
    with pytest.raises(SampleError, match="is empty"):
        pipeline.plan(files.blob("image", b""))
    with pytest.raises(SampleError, match="max_media_bytes is 100"):
        pipeline.plan(files.blob("image", files.image()))


def test_a_processors_own_error_gets_the_files_name(files):
    pipeline = MediaPipeline(vision=Qwen2VLProcessor(), audio=None, limits=DEFAULT_LIMITS)
    with pytest.raises(SampleError, match=r"image 'thin.png'.*aspect ratio"):
        pipeline.plan(files.blob("image", files.image(600, 2, "PNG"), "thin.png"))


def test_a_processor_that_breaks_costs_one_sample_only(files):
    class Broken:
        def plan_image(self, *, width, height):
            return width // 0

        plan_video = plan_image

    pipeline = MediaPipeline(vision=Broken(), audio=None, limits=DEFAULT_LIMITS)
    with pytest.raises(SampleError, match="failed with ZeroDivisionError"):
        pipeline.plan(files.blob("image", files.image()))
