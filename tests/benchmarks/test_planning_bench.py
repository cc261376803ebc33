import itertools

import numpy as np
import pytest

from benchmarks import exact, rivals, workloads
from benchmarks.harness import (
    TINY,
    Peer,
    Row,
    bars,
    fitted_exponent,
    side_by_side,
    slug,
    written,
)
from benchmarks.planning.__main__ import QUALITY, main
from benchmarks.planning.growth import grow, growth_to_text
from benchmarks.report import rows_to_markdown, verdict
from dataservice.planning import ContextCost, partition

COST = ContextCost.flexsp_7b()


@pytest.mark.long
@pytest.mark.parametrize("name", QUALITY)
def test_every_bar_of_quality_is_met_on_small_inputs(name):
    rows = QUALITY[name](TINY)
    assert rows
    for row in rows:
        assert row.group == name
        assert row.unit not in ("s", "ms"), "a time, which depends on the machine, is no quality"
        assert row.met is not False, f"{row.what}: {row.figure} against {row.bar}"
        assert row.explanation


@pytest.mark.parametrize("name", workloads.WORKLOADS)
def test_workloads_are_seeded_and_valid_lengths(name):
    draw = workloads.WORKLOADS[name]
    one, again, other = draw(500, 1), draw(500, 1), draw(500, 2)
    np.testing.assert_array_equal(one.llm_tokens, again.llm_tokens)
    assert (one.llm_tokens != other.llm_tokens).any()
    assert one.llm_tokens.min() >= 1
    assert (one.media_llm_tokens < one.llm_tokens).all()
    step = workloads.step_samples(one)
    assert len(step.lengths) == 500


def test_vlm_sft_and_speech_have_their_published_statistics():
    vlm = workloads.vlm_sft(100_000)
    assert (vlm.llm_tokens - vlm.media_llm_tokens).mean() == pytest.approx(267, rel=0.02)
    tiles, counts = np.unique(vlm.encoder_tokens // 1024, return_counts=True)
    assert tiles.tolist() == [1, 3, 5]
    np.testing.assert_allclose(counts / 100_000, [0.70, 0.14, 0.16], atol=0.01)
    seconds = workloads.speech(100_000).encoder_tokens / 50
    np.testing.assert_allclose(
        np.quantile(seconds, [0.05, 0.5, 0.95]), [4.2, 13.7, 17.3], rtol=0.02
    )


def test_differencing_follows_the_textbook_example():
    parts = rivals.differencing([8.0, 7.0, 6.0, 5.0, 4.0], 2)
    assert sorted(sum((8, 7, 6, 5, 4)[i] for i in part) for part in parts) == [14, 16]
    costs = np.random.default_rng(0).lognormal(5, 1, 200)
    loads = [costs[part].sum() for part in rivals.differencing(costs.tolist(), 7)]
    assert max(loads) == pytest.approx(partition(costs, 7, algorithm="kk").max_load)


def test_first_fit_holds_every_sample_within_its_bin():
    lengths = workloads.vlm_sft(3000).llm_tokens
    bin_of = rivals.first_fit_decreasing(lengths, 8192, group=1000)
    assert np.bincount(bin_of, weights=lengths).max() <= 8192
    assert lengths.sum() / (8192 * (bin_of.max() + 1)) > 0.98


@pytest.mark.parametrize("memory_tokens", [4096, 65_536])
def test_power_of_two_waves_hold_every_sample_once(memory_tokens):
    tokens = workloads.video(400).llm_tokens
    waves = rivals.power_of_two_waves(tokens, ranks=64, memory_tokens=memory_tokens)
    placed = sorted(i for wave in waves for samples, _ in wave for i in samples)
    assert placed == list(range(400))
    for wave in waves:
        assert sum(degree for _, degree in wave) <= 64
        for samples, degree in wave:
            assert degree & (degree - 1) == 0
            assert samples
            assert tokens[samples].max() <= degree * memory_tokens


def test_dhp_groups_keep_to_the_memory_of_their_least_degree():
    tokens = workloads.vlm_long(512).llm_tokens
    groups, least = rivals.dhp_groups(tokens, ranks=64, memory_tokens=16_384)
    assert sorted(i for group in groups for i in group) == list(range(512))
    for group, degree in zip(groups, least, strict=True):
        assert tokens[group].sum() <= degree * 16_384
    with pytest.raises(ValueError, match="are needed and there are 8"):
        rivals.dhp_groups(tokens, ranks=8, memory_tokens=16_384)


def test_enumeration_and_integer_program_agree():
    generator = np.random.default_rng(2)
    for _ in range(4):
        costs = generator.lognormal(3, 1, 6)
        assert exact.solver_max_load(costs, 3) == pytest.approx(exact.best_max_load(costs, 3))
    times = np.array([[8.0, 4.0, 3.0, 2.0], [3.5, 1.0, 1.0, 1.0]])
    assert exact.solver_degrees(times, 4) == pytest.approx(3.5)
    assert exact.best_padded_load(np.array([2.0, 2.0, 5.0]), 2, 0.0) == 5.0


def test_a_row_says_its_bar_and_whether_it_is_met():
    row = Row(
        group="plan",
        what="whole plan",
        figure=20.0,
        unit="ms",
        limit=50.0,
        peers=(Peer(name="prtpy", figure=400.0),),
        explanation="because",
    )
    assert (row.met, row.bar) == (True, "≤ 50 ms")
    assert row.peer_text(row.peers[0]) == "prtpy 400 ms (×20)"
    missed = Row(group="order", what="gain", figure=3.0, unit="%", limit=5.0, at_least=True)
    assert (missed.met, missed.bar) == (False, "≥ 5 %")
    text = rows_to_markdown("Speed", [row, missed])
    assert "| whole plan | **20 ms** | ≤ 50 ms | met | prtpy 400 ms (×20) |" in text
    assert verdict([row, missed]).startswith("1 of 2 bars met.\n- NOT MET: gain: 3 %")


def test_figures_are_written_with_three_digits():
    assert [written(value, "ms") for value in (0, 0.12345, 12.345, 1234.5, 2.5e-6)] == [
        "0 ms",
        "0.123 ms",
        "12.3 ms",
        "1234 ms",
        "2.5e-06 ms",
    ]
    assert slug("AMD EPYC, 2 cores") == "amd-epyc-2-cores"


def test_calls_take_turns_and_growth_is_fitted():
    turns = []
    calls = {name: lambda name=name: turns.append(name) for name in ("a", "b")}
    best = side_by_side(calls, repeats=2)
    assert [name for name, _ in itertools.groupby(turns)] == ["a", "b"] * 3
    assert set(best) == {"a", "b"}
    assert all(0 < timing.wall_s < np.inf for timing in best.values())
    sizes = np.array([10.0, 100.0, 1000.0])
    assert fitted_exponent(sizes, 3e-6 * sizes**1.5) == pytest.approx(1.5)
    assert [len(bar) for bar in bars([1.0, 2.0], width=10)] == [5, 10]


def test_growth_covers_every_planner():
    text = growth_to_text(grow(TINY))
    for planner in ("whole plan", "partition", "context waves"):
        assert planner in text


def test_some_rows_alone_are_printed_and_written_on_request(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("benchmarks.planning.__main__.QUICK", TINY)
    monkeypatch.setattr("benchmarks.planning.__main__.warm_up", lambda: None)
    arguments = ["--quick", "--only", "padded", "--output", str(tmp_path), "--date", "2026-01-02"]
    main(arguments)
    assert "balance_padded differing" in capsys.readouterr().out.replace("\n", " ")
    (path,) = tmp_path.iterdir()
    assert path.name.startswith("planning_")
    assert path.name.endswith("_2026-01-02.md")
    assert "1 of 1 bars met" in path.read_text()
