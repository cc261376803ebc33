"""`dataservice calibrate`: from a model, or from measurements, to a file that a job can name."""

import json
from pathlib import Path

import pytest

from dataservice.core.cost import ContextCost
from dataservice.jobs.calibrate import modalities_of
from dataservice.jobs.cost_file import read_cost_file
from dataservice.jobs.job_file import JobSpec

pytestmark = pytest.mark.long

ROOT = Path(__file__).resolve().parents[2]
LENGTHS = [256, 512, 1024, 2048, 4096, 8192, 16384, 32768]


def written(path: Path, cost: ContextCost, degrees=(1, 2, 4), **changes) -> Path:
    rows = [
        {"tokens": [n], "degree": d, "crosses_node": False, "seconds": cost.time_s([n], d)}
        for n in LENGTHS
        for d in degrees
    ]
    plain = {
        "format": 1, "when": "2025-01-01T00:00:00+00:00", "model": "mine:build",
        "hardware": "a GPU", "ranks": 4, "measurements": {"llm": rows},
    }  # fmt: skip
    path.write_text(json.dumps({**plain, **changes}))
    return path


def test_a_model_is_measured_on_ranks_of_its_own_and_its_cost_file_read(cli, tmp_path):
    """The longest sample takes twenty times as long as the shortest: on a busy machine a small
    difference drowns, and then the time per token is 0."""
    said = cli.ok(
        "calibrate", "--model", "demo.model:DemoModel", "--ranks", "2", "--repeats", "1",
        "--lengths", "96,384,768,1536", "--item-tokens", "16 32 64 96 128", "--device", "cpu",
        "--out", tmp_path / "cost.yaml", path=ROOT,
    ).said  # fmt: skip
    for part in ("attention_s_per_token2", "(assumed)", "held out", "vision", "audio", "version"):
        assert part in said
    made = read_cost_file(tmp_path / "cost.yaml")
    assert made.version in said
    assert made.measured.model == "demo.model:DemoModel"
    assert made.measured.ranks == 2
    assert made.held_out["llm"].count > 0
    assert made.cost.llm.linear_s_per_token + made.cost.llm.attention_s_per_token2 > 0
    assert made.cost.vision is not None


def test_measurements_made_elsewhere_are_fitted(cli, tmp_path):
    truth = ContextCost.flexsp_7b()
    path = written(tmp_path / "m.json", truth)
    cli.ok("calibrate", "--measurements", path, "--out", tmp_path / "cost.yaml")
    made = read_cost_file(tmp_path / "cost.yaml")
    assert made.cost.llm.linear_s_per_token == pytest.approx(truth.linear_s_per_token, rel=0.01)
    assert made.held_out["llm"].largest < 0.01
    assert made.cost.vision is None  # was not measured


def test_peaks_become_the_memory_of_a_rank(cli, tmp_path):
    truth = ContextCost.flexsp_7b()
    rows = [
        {
            "tokens": [n],
            "degree": d,
            "seconds": truth.time_s([n], d),
            "peak_bytes": 1e8 + 2e6 * n / d,
        }
        for n in LENGTHS
        for d in (1, 2)
    ]
    images = [
        {"tokens": [n], "seconds": 1e-3 + 1e-6 * n, "peak_bytes": 1e6 + 5e4 * n} for n in LENGTHS
    ]
    device = {"device_bytes": 80e9, "weights_bytes": 20e9, "gradients_bytes": 15e9}
    path = written(
        tmp_path / "m.json", truth, memory=device, measurements={"llm": rows, "vision": images}
    )
    said = cli.ok("calibrate", "--measurements", path, "--out", tmp_path / "cost.yaml").said
    assert "memory of a rank, bytes" in said
    assert "add the optimizer's" in said
    made = read_cost_file(tmp_path / "cost.yaml")
    assert made.memory.budget_bytes == 72e9
    assert made.memory.states_bytes == 35e9
    assert made.memory.llm_token_bytes == pytest.approx(2e6, rel=0.01)
    assert made.memory.vision_token_bytes == pytest.approx(5e4, rel=0.01)
    assert made.memory.audio_token_bytes == 0.0
    assert made.held_out["vision, bytes"].largest < 0.01


def test_where_no_peak_was_told_the_file_has_no_memory_and_that_is_said(cli, tmp_path):
    path = written(tmp_path / "m.json", ContextCost.flexsp_7b())
    said = cli.ok("calibrate", "--measurements", path, "--out", tmp_path / "cost.yaml").said
    assert "no memory was measured, as only CUDA tells a peak" in said
    assert read_cost_file(tmp_path / "cost.yaml").memory is None


def test_what_was_fitted_is_also_json(cli, tmp_path):
    path = written(tmp_path / "m.json", ContextCost.flexsp_7b())
    out = tmp_path / "cost.yaml"
    said = json.loads(cli.ok("calibrate", "--measurements", path, "--out", out, "--json").out)
    assert said["version"] == read_cost_file(out).cost.model.version
    assert said["cost"] == read_cost_file(out).cost.model.to_dict()
    assert said["errors"]["llm"]["held_out"]["largest"] < 0.01


def test_rings_that_were_not_measured_are_pointed_out(cli, tmp_path):
    path = written(tmp_path / "m.json", ContextCost.flexsp_7b(), degrees=(1,))
    said = cli.ok("calibrate", "--measurements", path, "--out", tmp_path / "cost.yaml").said
    assert "no CP degree above 1 was measured" in said


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ((), ["either --model", "or --measurements"]),
        (("--model", "a:b", "--measurements", "m.json"), ["either --model"]),
        (("--model", "a:b", "--lengths", "many"), ["--lengths is 'many'; give whole numbers"]),
        (("--measurements", "nowhere.json"), ["nowhere.json cannot be read"]),
        (("--model", "a:b", "--layers", "nowhere/l.yaml"), ["nowhere/l.yaml is in a folder"]),
    ],
)
def test_a_mistake_in_the_command_is_named(cli, tmp_path, arguments, parts):
    said = cli.refused("calibrate", *arguments, "--out", tmp_path / "cost.yaml")
    for part in parts:
        assert part in said


def test_a_model_that_cannot_be_built_is_named_by_the_ranks(cli, tmp_path):
    said = cli.refused(
        "calibrate", "--model", "demo.model:Nothing", "--ranks", "1",
        "--out", tmp_path / "cost.yaml", path=ROOT,
    )  # fmt: skip
    assert "--model 'demo.model:Nothing' cannot be imported" in said


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"format": 7}, "have format 7; this release reads 1"),
        ({"measurements": {}}, "none of the decoder"),
        ({"measurements": {"llm": [{"tokens": [5], "seconds": 0}]}}, "holds no measurements"),
        ({"measurements": {"llm": [{"tokens": [5], "seconds": 1}]}}, "needs 6"),
    ],
)
def test_measurements_that_are_none_are_refused(cli, tmp_path, changes, part):
    path = written(tmp_path / "m.json", ContextCost.flexsp_7b(), **changes)
    said = cli.refused("calibrate", "--measurements", path, "--out", tmp_path / "cost.yaml")
    assert part in said


@pytest.mark.parametrize(
    ("vision", "expected"),
    [
        ({"kind": "qwen2_vl"}, "vision:4:area"),
        ({"kind": "internvl"}, "vision:4:frames"),
        ({"kind": "llava"}, "vision:1:frames"),
    ],
)
def test_a_job_says_how_its_encoders_count_and_grow(vision, expected):
    spec = JobSpec.model_validate(
        {
            "job": "job",
            "sources": [{"name": "a", "format": "jsonl", "url": "a.jsonl"}],
            "index": "index",
            "pipeline": {"tokenizer": "t", "vision": vision, "audio": {"kind": "whisper"}},
            "batch": {"samples": 1},
            "plan": {"memory_tokens": 1},
        }
    )
    assert modalities_of(spec, {}) == [expected, "audio:2:area"]
