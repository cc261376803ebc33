"""Token counts against the figures that the models' authors publish."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataservice.core.errors import SampleError, SpecError
from dataservice.decode.processors.base import VideoHeader, View, VisionPlan
from dataservice.decode.processors.frames import evenly_spaced, segment_midpoints
from dataservice.decode.processors.gemma3 import Gemma3Processor
from dataservice.decode.processors.idefics3 import Idefics3Processor, in_words
from dataservice.decode.processors.internvl import InternVLProcessor, tile_grids
from dataservice.decode.processors.llava import LlavaProcessor
from dataservice.decode.processors.llava_next import LlavaNextProcessor
from dataservice.decode.processors.qwen2_vl import Qwen2VLProcessor, smart_resize
from dataservice.decode.processors.qwen3_vl import Qwen3VLProcessor
from dataservice.decode.processors.siglip import SiglipProcessor
from dataservice.decode.processors.whisper import WhisperProcessor

sides = st.integers(1, 5000)


def clip(frames: int, frames_per_s: float, width: int = 1280, height: int = 720) -> VideoHeader:
    return VideoHeader(width=width, height=height, frames=frames, frames_per_s=frames_per_s)


# ---- qwen2_vl -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("width", "height", "grid", "tokens"),
    [
        (224, 224, (16, 16), 64),  # the paper: 66 tokens with start and end
        (2044, 1372, (98, 146), 3577),  # the model card's demo picture
        (1920, 1080, (78, 138), 2691),
        (28, 28, (4, 4), 4),  # enlarged to min_pixels
        (1, 1, (4, 4), 4),
        (20, 4000, (286, 2), 143),
    ],
)
def test_qwen2_vl_images_cost_what_is_published(width, height, grid, tokens):
    plan = Qwen2VLProcessor().plan_image(width=width, height=height)
    assert plan.shape == (1, grid[0] * 14, grid[1] * 14, 3)
    assert plan.encoder_tokens == grid[0] * grid[1]
    assert plan.llm_tokens == tokens


def test_qwen2_vl_shrinks_an_image_to_max_pixels():
    # 1280 · 28² is the class default of the published image processor.
    plan = Qwen2VLProcessor(max_pixels=1280 * 28 * 28).plan_image(width=4000, height=3000)
    assert plan.shape == (1, 840, 1148, 3)
    assert plan.llm_tokens == 30 * 41


def test_qwen2_vl_refuses_a_thread_of_a_picture():
    with pytest.raises(SampleError, match=r"aspect ratio of 300.*at most 200"):
        Qwen2VLProcessor().plan_image(width=3000, height=10)


@given(width=sides, height=sides)
def test_smart_resize_keeps_to_its_grid_and_its_area(width, height):
    if max(width, height) > 200 * min(width, height):
        return
    rows, columns = smart_resize(height, width, min_pixels=3136, max_pixels=1_003_520)
    assert rows % 28 == columns % 28 == 0
    assert rows * columns >= 3136
    assert rows * columns <= 1_003_520 or min(rows, columns) == 28


@pytest.mark.parametrize(
    ("header", "frames", "size"),
    [
        # 10 s at 2 a second; 768 · 28² pixels a frame at most.
        (clip(300, 30), 20, (560, 1008)),
        # 1 s would be 2 frames: at least 4.
        (clip(30, 30, 320, 240), 4, (280, 392)),
        # 5 frames at 5 a second: 4 is the most that is even.
        (clip(5, 5, 320, 240), 4, (280, 392)),
        # An hour: 768 frames, of 1.05 · 128 · 28² pixels each, since the total is used up.
        (clip(36_000, 10), 768, (224, 420)),
        # 48 frames share 24576 · 28² pixels in pairs: 1024 · 28² each, so 768 · 28² rules.
        (clip(240, 10), 48, (560, 1008)),
        # 96 frames: 512 · 28² each.
        (clip(480, 10), 96, (448, 840)),
        (clip(1, 25, 320, 240), 2, (280, 392)),
        (clip(3, 25, 320, 240), 2, (280, 392)),
    ],
)
def test_qwen2_vl_samples_and_sizes_clips_as_published(header, frames, size):
    plan = Qwen2VLProcessor().plan_video(header)
    assert plan.shape == (frames, *size, 3)
    assert plan.encoder_tokens == frames // 2 * (size[0] // 14) * (size[1] // 14)
    assert plan.llm_tokens == plan.encoder_tokens // 4
    assert plan.frame_indices[0] == 0
    assert plan.frame_indices[-1] == header.frames - 1


# ---- internvl -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("width", "height", "tiles"),
    [
        (448, 448, 1),
        (600, 600, 1),  # under half of 2 × 2
        (800, 800, 5),  # 2 × 2 and the thumbnail
        (1600, 1600, 10),  # 3 × 3: 16 tiles are too many
        (800, 600, 13),  # 4 × 3 is exact, whatever the area
        (1280, 720, 9),  # 16:9 is nearest to 4 × 2 of all grids of at most 12
        (3000, 250, 13),  # 12 × 1
        (100, 5000, 13),  # 1 × 12
    ],
)
def test_internvl_cuts_images_as_published(width, height, tiles):
    plan = InternVLProcessor().plan_image(width=width, height=height)
    assert plan.shape == (tiles, 448, 448, 3)
    assert plan.llm_tokens == 256 * tiles
    assert plan.encoder_tokens == 1024 * tiles


def test_internvl_at_most_gives_3328_tokens():
    # InternVL 1.5 §3.2: training ranges from 256 to 3,328 visual tokens.
    costs = {
        InternVLProcessor().plan_image(width=w, height=h).llm_tokens
        for w in range(100, 3000, 130)
        for h in range(100, 3000, 130)
    }
    assert (min(costs), max(costs)) == (256, 3328)


def test_internvl_has_35_grids_of_up_to_12_tiles():
    # InternVL 1.5 §3.2 names 35 aspect ratios.
    assert len(tile_grids(1, 12)) == 35


def test_internvl_reads_its_tiles_row_by_row():
    view = InternVLProcessor().plan_image(width=900, height=600).views[0]
    assert view.origins[:4] == ((0, 0), (448, 0), (896, 0), (0, 448))


def test_internvl_without_a_thumbnail_and_with_fewer_tiles():
    plan = InternVLProcessor(thumbnail=False, max_tiles=4).plan_image(width=800, height=800)
    assert plan.llm_tokens == 4 * 256


def test_internvl_sees_eight_frames_of_a_clip():
    plan = InternVLProcessor().plan_video(clip(81, 25))
    assert plan.frame_indices == (5, 15, 25, 35, 45, 55, 65, 75)
    assert (plan.llm_tokens, plan.encoder_tokens) == (2048, 8192)


# ---- llava --------------------------------------------------------------------------------


@pytest.mark.parametrize("aspect", ["crop", "pad"])
@given(width=sides, height=sides)
def test_llava_images_always_cost_576(aspect, width, height):
    if max(width, height) > 200 * min(width, height):
        return
    plan = LlavaProcessor(aspect=aspect).plan_image(width=width, height=height)
    assert (plan.encoder_tokens, plan.llm_tokens) == (576, 576)
    assert plan.shape == (1, 336, 336, 3)


def test_llava_crops_the_centre_as_clip_does():
    view = LlavaProcessor().plan_image(width=640, height=480).views[0]
    assert (view.width, view.height) == (448, 336)
    assert view.origins == ((56, 0),)


def test_llava_pads_to_a_square_before_it_resizes():
    view = LlavaProcessor(aspect="pad").plan_image(width=640, height=480).views[0]
    assert (view.width, view.height, view.origins, view.square) == (336, 336, ((0, 0),), True)


# ---- texts and runs -----------------------------------------------------------------------


def test_qwen3_vl_writes_the_time_before_each_pair_of_frames():
    plan = Qwen3VLProcessor().plan_video(clip(75, 30, 320, 240))
    assert plan.frame_indices == (0, 18, 37, 56, 74, 74)
    assert plan.grid[0] == 1
    assert plan.texts == (
        "<|vision_start|><0.3 seconds>",
        "<1.6 seconds>",
        "<2.5 seconds>",
        "<|vision_end|>",
    )


def test_internvl_numbers_the_frames_of_a_clip():
    plan = InternVLProcessor(video_frames=3).plan_video(clip(81, 25))
    assert plan.texts == ("Frame1: ", "\nFrame2: ", "\nFrame3: ", "")


def test_idefics3_names_its_tiles_by_row_and_column():
    plan = Idefics3Processor(longest=2 * 364).plan_image(width=800, height=800)
    fake = "<fake_token_around_image>"
    assert plan.texts == (
        f"{fake}<row_1_col_1>",
        f"{fake}<row_1_col_2>",
        f"\n{fake}<row_2_col_1>",
        f"{fake}<row_2_col_2>",
        f"\n\n{fake}<global-img>",
        fake,
    )


def test_smolvlm_says_how_long_a_clip_is_and_when_each_frame_is():
    plan = Idefics3Processor(kind="smolvlm2", video_max_frames=2).plan_video(clip(1000, 10))
    around = "<fake_token_around_image>"
    assert plan.frame_indices == (10, 990)  # not the first second, nor the last
    assert plan.texts == (
        "You are provided the following series of two frames from a 0:01:40 [H:MM:SS] video.\n"
        f"\nFrame from 00:01:{around}<global-img>",
        f"{around}\nFrame from 01:39:{around}<global-img>",
        f"{around}\n\n",
    )


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (1, "one"),
        (13, "thirteen"),
        (20, "twenty"),
        (64, "sixty-four"),
        (100, "one hundred"),
        (115, "one hundred and fifteen"),
        (999, "nine hundred and ninety-nine"),
    ],
)
def test_numbers_are_written_in_words(number, words):
    assert in_words(number) == words


@pytest.mark.parametrize(
    "processor",
    [LlavaNextProcessor(), Gemma3Processor(), Idefics3Processor(), SiglipProcessor()],
    ids=lambda processor: processor.kind,
)
def test_families_of_pictures_refuse_clips(processor):
    with pytest.raises(SampleError, match=f"{processor.kind} takes pictures only"):
        processor.plan_video(clip(10, 10))


# ---- whisper ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seconds", "pool", "encoder", "llm"),
    [
        (30.0, 2, 1500, 750),  # Whisper's 1,500 positions; Qwen2-Audio's 750 tokens
        (30.0, 1, 1500, 1500),
        (1.0, 2, 50, 25),
        (10.01, 2, 501, 250),
        (0.001, 2, 2, 1),  # silence is added up to one LLM token
    ],
)
def test_whisper_counts_as_published(seconds, pool, encoder, llm):
    (chunk,) = WhisperProcessor(pool=pool).plan(round(seconds * 16_000))
    assert (chunk.encoder_tokens, chunk.llm_tokens) == (encoder, llm)


@given(samples=st.integers(1, 16_000 * 100), pool=st.integers(1, 8))
def test_whisper_chunks_hold_every_sample_and_whole_frames(samples, pool):
    chunks = WhisperProcessor(pool=pool).plan(samples)
    assert sum(chunk.samples for chunk in chunks) >= samples
    assert sum(chunk.samples for chunk in chunks[:-1]) < samples
    for chunk in chunks:
        assert chunk.samples % 160 == 0
        assert chunk.samples <= 480_000
        frames = chunk.samples // 160
        # The stem: kernel 3, padding 1, stride 2; then an average pool without padding.
        assert chunk.encoder_tokens == (frames + 2 * 1 - 3) // 2 + 1
        assert chunk.llm_tokens == (chunk.encoder_tokens - pool) // pool + 1 >= 1


# ---- frames, plans and options ------------------------------------------------------------


@given(total=st.integers(1, 2000), count=st.integers(1, 100))
def test_sampled_frames_exist_and_do_not_go_back(total, count):
    for indices in (evenly_spaced(total, count), segment_midpoints(total, count)):
        assert len(indices) == count
        assert all(0 <= index < total for index in indices)
        assert list(indices) == sorted(indices)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Qwen2VLProcessor(min_pixels=10),
        lambda: Qwen2VLProcessor(min_pixels=2_000_000, max_pixels=1_000_000),
        lambda: Qwen2VLProcessor(video_min_frames=8, video_max_frames=4),
        lambda: Qwen2VLProcessor(video_fps=0),
        lambda: InternVLProcessor(min_tiles=7, max_tiles=6),
        lambda: InternVLProcessor(video_frames=0),
        lambda: LlavaProcessor(video_frames=0),
        lambda: LlavaNextProcessor(canvases=()),
        lambda: LlavaNextProcessor(canvases=((0, 2),)),
        lambda: Qwen3VLProcessor(min_pixels=10),
        lambda: Qwen3VLProcessor(video_frame_pixels=10),
        lambda: Qwen3VLProcessor(video_min_pixels=2**26),
        lambda: Qwen3VLProcessor(video_min_frames=1),
        lambda: Qwen3VLProcessor(video_fps=0),
        lambda: Idefics3Processor(tile=365, shuffle=4),
        lambda: Idefics3Processor(longest=7 * 364),
        lambda: Idefics3Processor(video_max_frames=1000),
        lambda: Idefics3Processor(video_fps=0),
        lambda: SiglipProcessor(side=13, patch=14),
        lambda: WhisperProcessor(pool=0),
        lambda: WhisperProcessor(chunk_s=31.0),
        lambda: WhisperProcessor(chunk_s=1.005),
    ],
)
def test_impossible_options_are_refused_when_made(make):
    with pytest.raises(SpecError, match=r"must be|above"):
        make()


@pytest.mark.parametrize(
    "fields",
    [
        {"views": ()},
        {"views": (View.whole(8, 8), View.whole(9, 9))},
        {"views": (View.whole(8, 8),), "llm_tokens": 0},
        {"views": (View.whole(8, 8), View.whole(8, 8)), "frame_indices": (0,)},
        {"views": (View.whole(8, 8),), "texts": ("alone",)},
        {"views": (View.whole(8, 8),), "texts": ("one item", "of two", "runs")},
        {"views": (View.whole(8, 8),), "frame_indices": (0, 1, 2), "texts": ("", "", "")},
        {"views": (View.whole(8, 8),), "grid": (1, 2, 2, 2)},
        {"views": (View.whole(8, 8),), "grid": (1, 1, 0, 1)},
        {"views": (View.whole(8, 8),), "grid": (1, 1, 1)},
        {"views": (View.whole(8, 8),), "grid": (1, 1, 1, 1), "seconds_per_patch": 0.0},
        {"views": (View.whole(8, 8),), "grid": (1, 1, 1, 1), "seconds_per_patch": math.nan},
    ],
)
def test_a_plan_that_cannot_be_carried_out_is_refused(fields):
    with pytest.raises(SampleError, match="vision processor plans"):
        VisionPlan(**{"encoder_tokens": 1, "llm_tokens": 1, **fields})
