"""The GPU benchmark walks its whole path on the CPU, needs nothing of the service, and fits."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import runtime_gpu, runtime_parity, runtime_speed
from benchmarks.runtime_model import TINY
from benchmarks.runtime_rows import Row
from dataservice.planning.calibration import Measurement, split_held_out

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")


@pytest.mark.long
def test_the_tiny_run_gives_every_row_and_measurements_to_calibrate(tmp_path):
    table, found = tmp_path / "table.md", tmp_path / "measurements.json"
    arguments = ["--device", "cpu", "--tiny", "--out", table, "--measurements", found]
    assert runtime_gpu.main([str(argument) for argument in arguments]) == 0
    text = table.read_text()
    for part in ("attention kernel", "cost model, llm", "cost model, vision", "ring of 8 over",
                 "ring of 8 against fp64", "FlashAttention 3 against fp64 | skipped",
                 "values of 8 (MLA)", "padded / packed", "copies of", "run_step over a bare",
                 "run_step in 4 processes", "host waits", "peak bytes", "toy sizes"):  # fmt: skip
        assert part in text
    assert "NOT MET" not in text
    measured = json.loads(found.read_text())
    assert set(measured["measurements"]) == {"llm", "vision"}
    assert all(row["seconds"] > 0 for rows in measured["measurements"].values() for row in rows)


def test_every_ring_is_exact_on_a_cpu():
    rows = list(runtime_parity.ring_rows(TINY, CPU, torch.float64))
    assert len(rows) == len(TINY.parity_degrees)
    assert all(row.met for row in rows), rows


def test_every_ring_with_narrower_values_is_exact_on_a_cpu():
    rows = list(runtime_parity.mla_rows(TINY, CPU, torch.float64))
    assert len(rows) == len(TINY.parity_degrees)
    assert all("queries and keys of 12, values of 8" in row.what for row in rows)
    assert all(row.met for row in rows), rows


def test_flash_attention_3_is_skipped_with_a_word_where_it_is_not_to_be_had(monkeypatch):
    (row,) = runtime_parity.flash3_rows(TINY, CPU, torch.float64)
    assert (row.figure, row.met) == ("skipped: it runs on GPUs", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    (row,) = runtime_parity.flash3_rows(TINY, torch.device("cuda"), torch.bfloat16)
    assert row.figure.startswith("skipped: flash_attn_interface, the package")
    assert row.met is None


@pytest.mark.parametrize("fails", [False, True])
def test_flash_attention_3_is_switched_on_for_its_rows_alone(monkeypatch, fails):
    switched, plain = [], runtime_parity.ring

    def ring(pack, degree, kernel="auto"):
        switched.append(kernel)
        if fails and kernel == "flash3":
            raise RuntimeError("no such kernel image")
        return plain(pack, degree)

    monkeypatch.setattr(runtime_parity, "ring", ring)
    monkeypatch.setattr(runtime_parity, "lacking_flash3", lambda device: "")
    monkeypatch.setattr(runtime_parity, "activate_flash_attention_impl", switched.append)
    monkeypatch.setattr(
        runtime_parity, "restore_flash_attention_impl", lambda: switched.append("back")
    )
    rows = runtime_gpu.shown(
        "flash3", lambda: runtime_parity.flash3_rows(TINY, CPU, torch.bfloat16)
    )
    found = [row.met for row in rows]
    assert found == ([False] if fails else [True, True])
    asked = ["flash3"] if fails else ["flash3", "flash3"]
    assert switched == ["auto", "auto", "FA3", *asked, "back"]


def test_half_precision_is_judged_by_a_fused_call():
    rows = [
        *runtime_parity.ring_rows(TINY, CPU, torch.bfloat16),
        *runtime_parity.mla_rows(TINY, CPU, torch.bfloat16),
    ]
    assert all(row.met for row in rows), rows
    assert all("e-0" in row.bar for row in rows)


def test_a_wrong_ring_misses_its_bar(monkeypatch):
    right = runtime_parity.OneMember.post

    def mixed_up(self, sends, receives, **options):
        return right(self, sends[::-1], receives[::-1], **options)  # keys as values

    monkeypatch.setattr(runtime_parity.OneMember, "post", mixed_up)
    assert not any(row.met for row in runtime_parity.ring_rows(TINY, CPU, torch.float64))


@pytest.mark.parametrize(("met", "code"), [(True, 0), (None, 0), (False, 1)])
def test_a_row_that_misses_its_bar_fails_the_run(monkeypatch, tmp_path, met, code):
    row = Row(what="a", figure="b", bar="c", met=met)
    monkeypatch.setattr(runtime_gpu, "parity", lambda size, device: [row])
    table = tmp_path / "table.md"
    arguments = ["--device", "cpu", "--tiny", "--only", "parity", "--out", str(table)]
    assert runtime_gpu.main(arguments) == code
    assert ("NOT MET" in table.read_text()) == (code == 1)


@pytest.mark.long
def test_it_needs_only_torch_numpy_and_the_light_client():
    heavy = ["dataservice", "ray", "pyarrow", "av", "numba", "scipy", "pydantic", "rich"]
    code = f"import sys, benchmarks.runtime_gpu; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout.strip() == "[]"


def test_its_own_fit_finds_coefficients_under_noise_and_outliers():
    rng = np.random.default_rng(0)
    truth = np.array([5e-9, 1e-4, 0.02])
    n = np.geomspace(256, 32768, 24)
    columns = np.column_stack([n * n, n, np.ones_like(n)])
    seconds = columns @ truth * (1 + 0.01 * rng.standard_normal(24))
    seconds[[3, 11]] *= 3
    found = runtime_speed.nonnegative_fit(columns / seconds[:, None])
    assert columns @ found == pytest.approx(columns @ truth, rel=0.05)


def test_it_holds_out_the_same_loads_as_calibrate():
    loads = [(n,) for n in range(100, 2000, 100)]
    _, held = split_held_out([Measurement(tokens=load, seconds=1.0) for load in loads])
    every = runtime_speed.HELD_OUT_EVERY
    assert {m.tokens for m in held} == set(loads[every // 2 : -1 : every])
