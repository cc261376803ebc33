"""Pictures of a step: what they show, that they are the same each time, and what is refused."""

import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from benchmarks import workloads
from dataservice.core.errors import SpecError
from dataservice.core.plan_options import CostModel, PlanOptions
from dataservice.core.topology import Topology
from dataservice.jobs import pipeline_drawing
from dataservice.jobs.pipeline_drawing import (
    FILLS,
    Panel,
    draw_before_after,
    draw_timelines,
    require_drawable,
)
from dataservice.planning.compose import compose_step
from dataservice.planning.layout.before_after import time_before_after
from dataservice.planning.layout.search import LayoutTask, search_layout
from dataservice.planning.step_timeline import Bars, StepTimeline, step_timeline
from tests.planning.layout.small_models import MODEL, nodes


@pytest.fixture(scope="module")
def laid():
    batches = (workloads.step_samples(workloads.vlm_sft(96, 0)),)
    task = LayoutTask(model=MODEL, group=nodes(9e9), batches=batches)
    return task, time_before_after(task, search_layout(task))


def panel(**shape):
    topology = Topology(**shape)
    batch = workloads.step_samples(workloads.vlm_sft(48, 1))
    options = PlanOptions(memory_tokens=8192)
    plan = compose_step(batch, step=0, topology=topology, options=options)
    timeline = step_timeline(plan, topology, CostModel())
    return Panel(name="plan", words="", timeline=timeline)


def texts(path) -> list[str]:
    """The texts of an SVG."""
    root = ElementTree.parse(path).getroot()
    return [each.text or "" for each in root.iter("{http://www.w3.org/2000/svg}text")]


def comments(path) -> str:
    return " ".join(texts(path))


def test_both_pictures_say_how_long_a_step_takes_and_how_much_is_idle(laid, tmp_path):
    task, compared = laid
    vector, pixels = tmp_path / "a.svg", tmp_path / "a.png"
    draw_before_after([vector, pixels], task, compared, step_words="the first step")
    said = comments(vector)
    gain = compared.before.timeline.step_s / compared.after.timeline.step_s
    assert f"small on 4 GPUs: {gain:.2f} × as fast" in said
    assert "Before: the plainest layout that fits" in said
    for timed in (compared.before, compared.after):
        assert f"idle {timed.timeline.idle:.0%}" in said
        assert f"TP {timed.replica.parallel.tensor_ranks}" in said
    assert " ms" in said
    with Image.open(pixels) as image:
        assert image.width == 1920


def test_every_kind_of_work_has_its_fill_and_lightness(laid, tmp_path):
    task, compared = laid
    draw_before_after([tmp_path / "a.svg"], task, compared)
    text = (tmp_path / "a.svg").read_text()
    assert all(fill in text for work, fill in FILLS.items() if work != "gradients")
    light = [sum(bytes.fromhex(fill[1:])) for fill in FILLS.values()]
    assert len(set(light)) == len(light)
    assert light[1] - light[2] > 150, "forward is lighter than backward, also in grey"


def test_the_same_timelines_give_the_same_bytes(laid, tmp_path):
    task, compared = laid
    paths = [tmp_path / name for name in ("a.svg", "b.svg", "a.png", "b.png")]
    draw_before_after([paths[0], paths[2]], task, compared)
    draw_before_after([paths[1], paths[3]], task, compared)
    assert paths[0].read_bytes() == paths[1].read_bytes()
    assert paths[2].read_bytes() == paths[3].read_bytes()


def test_where_nothing_plain_fits_the_chosen_layout_is_drawn_alone(laid, tmp_path):
    task, compared = laid
    draw_before_after([tmp_path / "a.svg"], task, replace(compared, before=None))
    assert "No plain layout fits" in comments(tmp_path / "a.svg")
    assert "as fast" not in comments(tmp_path / "a.svg")


def test_microbatches_are_numbered_where_they_have_room(tmp_path):
    shape = {"world_size": 4, "ranks_per_replica": 4, "pipeline_stages": 4}
    shown = panel(**shape)
    draw_timelines([tmp_path / "a.svg"], [shown], title="a step")
    last = int(shown.timeline.bars.microbatch.max())
    said = texts(tmp_path / "a.svg")
    assert said.count(str(last)) == 2 * 4, "forward and backward on each stage"


def test_a_large_pipeline_is_drawn_without_numbers_as_one_path_a_kind(tmp_path):
    microbatch, stage, kind = (each.ravel() for each in np.indices((200, 16, 2)))
    start = (microbatch * 3 + stage + kind).astype(float)
    bars = Bars(stage, kind + 1, microbatch, start, start + 1.0)
    lanes = tuple(f"stage {k}" for k in range(16))
    large = StepTimeline(lanes=lanes, bars=bars, step_s=float(start.max() + 1))
    path = tmp_path / "a.svg"
    draw_timelines([path], [Panel(name="large", words="", timeline=large)], title="large")
    root = ElementTree.parse(path).getroot()
    filled = [
        each for each in root.iter("{http://www.w3.org/2000/svg}path")
        if FILLS["forward"] in each.get("style", "") and len(each.get("d", "")) > 10_000
    ]  # fmt: skip
    assert len(filled) == 1
    assert "199" not in texts(path)


@pytest.mark.parametrize("name", ["a.pdf", "a", "a.svg.gz"])
def test_another_ending_is_refused_with_those_there_are(tmp_path, name):
    with pytest.raises(SpecError, match=r"ends with .*; it is drawn as \.svg or \.png"):
        require_drawable([tmp_path / name])


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(SpecError, match=r"has no folder .*away: make it first"):
        require_drawable([tmp_path / "away" / "a.svg"])


def test_without_matplotlib_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr(pipeline_drawing, "find_spec", lambda name: None)
    require_drawable([])
    with pytest.raises(SpecError, match=r"not installed: `pip install '\.\[service,draw\]'"):
        require_drawable([tmp_path / "a.svg"])
