"""Fits: known coefficients come back from noisy measurements, and bad ones are refused."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataservice.core.cost import ContextCost, PhaseCost, StepCost
from dataservice.core.errors import PlanningError
from dataservice.planning.calibration import (
    Measurement,
    context_error,
    fit_bytes,
    fit_context,
    fit_phase,
    fit_step,
    phase_error,
    split_held_out,
)

LENGTHS = [256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384]
LOADS = [(n,) for n in LENGTHS] + [(n // 4,) * 4 for n in LENGTHS]


def coefficients(low, high):
    return st.floats(np.log(low), np.log(high)).map(lambda x: float(np.exp(x)))


@st.composite
def context_costs(draw):
    intra = draw(coefficients(1e-7, 3e-5))
    return ContextCost(
        attention_s_per_token2=draw(coefficients(1e-9, 3e-8)),
        linear_s_per_token=draw(coefficients(3e-5, 3e-4)),
        group_s=draw(coefficients(1e-3, 0.1)),
        ring_intra_s_per_token=intra,
        ring_inter_s_per_token=intra * draw(st.floats(1, 8)),
        ring_hop_s=draw(coefficients(1e-5, 1e-2)),
    )


def measured(cost, *, seed=0, noise=0.0, outliers=0.0, degrees=(1, 2, 3, 4), nodes=(False, True)):
    """What a machine of this cost would show; an outlier takes two to five times as long."""
    rng = np.random.default_rng(seed)
    found = []
    for tokens in LOADS:
        for degree in degrees:
            for crosses in nodes if degree > 1 else (False,):
                seconds = cost.time_s(tokens, degree, crosses_node=crosses)
                seconds *= 1 + noise * rng.standard_normal()
                seconds *= rng.uniform(2, 5) if rng.random() < outliers else 1
                found.append(
                    Measurement(tokens=tokens, seconds=seconds, degree=degree, crosses_node=crosses)
                )
    return found


def clean_error(cost, truth):
    return context_error(cost, measured(truth))


@settings(deadline=None, max_examples=25)
@given(truth=context_costs())
def test_exact_measurements_give_the_model_back(truth):
    fit = fit_context(measured(truth))
    assert fit.held_out.largest < 0.01
    assert clean_error(fit.cost, truth).largest < 0.01


@settings(deadline=None, max_examples=25)
@given(truth=context_costs(), seed=st.integers(0, 1000))
def test_noise_and_outliers_move_a_fit_by_little(truth, seed):
    fit = fit_context(measured(truth, seed=seed, noise=0.03, outliers=0.1))
    error = clean_error(fit.cost, truth)
    assert error.mean < 0.03
    assert fit.held_out.median < 0.05


def test_coefficients_that_show_are_found_each_by_itself():
    truth = ContextCost(
        attention_s_per_token2=5e-9,
        linear_s_per_token=1.5e-4,
        group_s=0.05,
        ring_intra_s_per_token=4e-5,
        ring_inter_s_per_token=1.2e-4,
        ring_hop_s=2e-3,
    )
    fit = fit_context(measured(truth, noise=0.01, outliers=0.1))
    for name, value in truth.to_dict().items():
        assert getattr(fit.cost, name) == pytest.approx(value, rel=0.15), name
    assert fit.unmeasured == ()


@settings(deadline=None, max_examples=25)
@given(
    linear=coefficients(1e-6, 1e-4),
    quadratic=st.one_of(st.just(0.0), coefficients(1e-10, 1e-8)),
    item=st.one_of(st.just(0.0), coefficients(1e-4, 1e-2)),
    batch=st.one_of(st.just(0.0), coefficients(1e-4, 1e-2)),
    seed=st.integers(0, 1000),
)
def test_an_encoder_is_found_under_noise_and_outliers(linear, quadratic, item, batch, seed):
    truth = PhaseCost(
        linear_s_per_token=linear, quadratic_s_per_token2=quadratic, item_s=item, batch_s=batch
    )
    rng = np.random.default_rng(seed)
    outliers = rng.permutation(len(LOADS))[: len(LOADS) // 10]
    exact, found = [], []
    for place, tokens in enumerate(LOADS):
        seconds = truth.batch_s + float(truth.item_seconds(tokens).sum())
        exact.append(Measurement(tokens=tokens, seconds=seconds))
        seconds *= 1 + 0.02 * rng.standard_normal()
        seconds *= 3 if place in outliers else 1
        found.append(Measurement(tokens=tokens, seconds=seconds))
    assert phase_error(fit_phase(found).cost, exact).mean < 0.1


def test_what_a_batch_takes_is_told_from_what_an_item_takes():
    truth = PhaseCost(linear_s_per_token=2e-5, item_s=5e-4, batch_s=3e-3)
    cost = fit_phase(encoded(truth)).cost
    assert cost.item_s == pytest.approx(truth.item_s, rel=0.01)
    assert cost.batch_s == pytest.approx(truth.batch_s, rel=0.01)


@pytest.mark.parametrize("items", [1, 3])
def test_what_an_item_takes_is_not_guessed_where_all_batches_have_as_many(items):
    lengths = (256, 512, 1024, 2048, 4096, 8192)
    fit = fit_phase(
        [Measurement(tokens=(n,) * items, seconds=0.02 + 1e-5 * n * items) for n in lengths]
    )
    assert fit.unmeasured == ("item_s",)
    assert fit.cost.item_s == 0
    assert fit.cost.batch_s == pytest.approx(0.02, rel=0.01)


def encoded(cost):
    """Exact measurements of an encoder."""
    return [
        Measurement(tokens=t, seconds=cost.batch_s + float(cost.item_seconds(t).sum()))
        for t in LOADS
    ]


def test_clips_are_judged_and_not_fitted():
    truth = PhaseCost(linear_s_per_token=2e-5, quadratic_s_per_token2=2e-8, item_s=5e-4)
    # Four spans that an encoder holds apart.
    clips = [
        Measurement(tokens=(4 * n,), seconds=4 * float(truth.item_seconds([n])[0]), clip=True)
        for n in LENGTHS
    ]
    fit = fit_phase(encoded(truth) + clips)
    assert fit.held_out.largest < 0.01
    (named,) = fit.apart
    assert named[0] == "clips"
    assert named[1].count == len(clips)
    assert named[1].mean > 0.5


def test_each_degree_is_judged_by_itself_too():
    truth = ContextCost.flexsp_7b()
    # Rings of three are slower than any model of them says.
    found = [
        replace(m, seconds=m.seconds * 1.3) if m.degree == 3 else m
        for m in measured(truth, nodes=(False,))
    ]
    of_degree = dict(fit_context(found).apart)
    assert list(of_degree) == [f"degree {degree}" for degree in (1, 2, 3, 4)]
    assert of_degree["degree 3"].mean > 2 * of_degree["degree 1"].mean


def test_held_out_lengths_lie_between_fitted_ones_and_keep_their_degrees_together():
    everything = measured(ContextCost.flexsp_7b())
    fitted, held_out = split_held_out(everything)
    assert sorted(m.tokens for m in fitted + held_out) == sorted(m.tokens for m in everything)
    assert {m.tokens for m in fitted}.isdisjoint(m.tokens for m in held_out)
    assert 0.15 < len(held_out) / len(everything) < 0.35
    totals = [sum(m.tokens) for m in fitted]
    assert all(min(totals) <= sum(m.tokens) <= max(totals) for m in held_out)
    assert split_held_out(everything) == (fitted, held_out)


def test_a_model_that_does_not_fit_says_so_on_the_held_out_lengths():
    cubic = [Measurement(tokens=(n,), seconds=1e-3 + 1e-12 * n**3) for n in LENGTHS]
    assert fit_context(cubic).held_out.largest > 0.2


def test_without_rings_they_are_free_and_named_as_unmeasured():
    truth = ContextCost(attention_s_per_token2=5e-9, linear_s_per_token=1e-4, group_s=0.02)
    fit = fit_context(measured(truth, degrees=(1,)))
    assert fit.cost.ring_intra_s_per_token == fit.cost.ring_inter_s_per_token == 0
    assert set(fit.unmeasured) == {
        "ring_intra_s_per_token", "ring_inter_s_per_token", "ring_hop_s",
    }  # fmt: skip


def test_without_a_second_node_its_ring_is_taken_to_be_as_fast():
    truth = ContextCost.flexsp_7b()
    fit = fit_context(measured(truth, nodes=(False,)))
    assert fit.cost.ring_inter_s_per_token == fit.cost.ring_intra_s_per_token
    assert fit.unmeasured == ("ring_inter_s_per_token",)


def test_without_a_ring_inside_a_node_it_is_taken_to_be_as_fast_as_between_them():
    fit = fit_context(measured(ContextCost.flexsp_7b(), nodes=(True,)))
    assert fit.unmeasured == ("ring_intra_s_per_token",)
    assert fit.cost.ring_intra_s_per_token == fit.cost.ring_inter_s_per_token
    assert fit.cost.ring_inter_s_per_token == pytest.approx(3e-5, rel=0.01)


def test_loads_at_degree_1_are_left_to_fit_to_among_others_at_higher_degrees():
    cost = ContextCost(attention_s_per_token2=1e-8, linear_s_per_token=1e-4, group_s=1e-3)
    alone = range(300, 2700, 400)  # each would be the one in four that is held out
    found = [Measurement(tokens=(n,), seconds=cost.time_s([n], 1)) for n in alone]
    found += [
        Measurement(tokens=(n,), seconds=cost.time_s([n], 2), degree=2)
        for n in range(100, 2700, 100)
        if n not in alone
    ]
    fit = fit_context(found)
    assert fit.cost.linear_s_per_token == pytest.approx(1e-4, rel=0.01)
    assert fit.held_out.largest < 0.01


def test_too_few_lengths_are_refused_with_what_is_needed():
    few = [Measurement(tokens=(n,), seconds=0.1) for n in (100, 200, 300)]
    with pytest.raises(PlanningError, match=r"3 different loads.*needs 6.*Measure more"):
        fit_context(few)
    with pytest.raises(PlanningError, match="3 different loads"):
        fit_phase(few)


def test_lengths_that_are_too_alike_are_refused():
    alike = [Measurement(tokens=(n,), seconds=0.1) for n in range(1000, 1010)]
    with pytest.raises(PlanningError, match=r"1000 to 1009.*wider range"):
        fit_phase(alike)


def test_measurements_at_higher_degrees_alone_are_refused():
    rings = [Measurement(tokens=(n,), seconds=0.1, degree=2) for n in LENGTHS]
    with pytest.raises(PlanningError, match="degree 1 was measured at 0"):
        fit_context(rings)


@pytest.mark.parametrize(
    "wrong",
    [
        {"tokens": (), "seconds": 1.0},
        {"tokens": (0,), "seconds": 1.0},
        {"tokens": (5,), "seconds": 0.0},
        {"tokens": (5,), "seconds": float("nan")},
        {"tokens": (5,), "seconds": 1.0, "degree": 0},
        {"tokens": (5,), "seconds": 1.0, "peak_bytes": 0.0},
    ],
)
def test_a_measurement_that_cannot_be_is_refused(wrong):
    with pytest.raises(PlanningError):
        Measurement(**wrong)


def test_exchanges_and_what_a_step_takes_once_come_back():
    truth = StepCost(
        feature_intra_s_per_token=1e-6, feature_inter_s_per_token=5e-6, exchange_s=1e-3
    )
    rates = (truth.feature_intra_s_per_token, truth.feature_inter_s_per_token)
    exchanges = [
        Measurement(tokens=(n,), seconds=1e-3 + rates[far] * n, crosses_node=far)
        for n in LENGTHS
        for far in (False, True)
    ]
    gradients = [Measurement(tokens=(1,), seconds=s) for s in (0.2, 0.3, 0.9)]
    fit = fit_step(exchanges, gradients)
    assert fit.cost.to_dict() == pytest.approx({**truth.to_dict(), "gradient_s": 0.3}, rel=1e-3)
    assert fit.held_out.largest < 0.01
    assert fit.unmeasured == ()


def test_rows_that_all_went_to_other_nodes_are_taken_to_be_as_fast_inside_one():
    rows = (100, 200, 400, 800, 1600, 3200, 6400)
    sent = [Measurement(tokens=(n,), seconds=1e-3 + 2e-6 * n, crosses_node=True) for n in rows]
    fit = fit_step(sent, [])
    assert "feature_intra_s_per_token" in fit.unmeasured
    assert fit.cost.feature_intra_s_per_token == fit.cost.feature_inter_s_per_token
    assert fit.cost.feature_inter_s_per_token == pytest.approx(2e-6, rel=0.01)


def test_what_of_a_step_was_not_measured_is_named():
    near = [Measurement(tokens=(n,), seconds=1e-3 + 1e-6 * n) for n in LENGTHS]
    assert fit_step(near, []).unmeasured == ("gradient_s", "feature_inter_s_per_token")
    assert fit_step(near, []).cost.feature_inter_s_per_token == pytest.approx(1e-6)
    alone = fit_step([], [Measurement(tokens=(1,), seconds=0.5)])
    assert alone.cost == StepCost(gradient_s=0.5)
    assert "exchange_s" in alone.unmeasured


def with_peaks(token_bytes, base_bytes, noise=0.0, degrees=(1, 2, 3)):
    rng = np.random.default_rng(0)
    return [
        replace(
            m,
            peak_bytes=(base_bytes + token_bytes * m.tokens_of_rank)
            * (1 + noise * rng.standard_normal()),
        )
        for m in measured(ContextCost.flexsp_7b(), degrees=degrees, nodes=(False,))
    ]


@settings(deadline=None, max_examples=25)
@given(token=coefficients(1e2, 1e7), base=coefficients(1e6, 1e9))
def test_exact_peaks_give_the_bytes_back(token, base):
    fit = fit_bytes(with_peaks(token, base), "llm")
    assert fit.held_out.count > 0
    assert fit.held_out.largest < 0.01
    assert fit.base_bytes + fit.token_bytes * 16384 == pytest.approx(base + token * 16384, rel=0.01)


def test_a_member_of_a_group_keeps_its_part_of_the_tokens():
    fit = fit_bytes(with_peaks(1e6, 1e7, noise=0.02), "llm")
    assert fit.token_bytes == pytest.approx(1e6, rel=0.02)
    assert fit.held_out.mean < 0.05


def test_peaks_that_grow_otherwise_show_on_the_held_out_lengths():
    squares = [
        Measurement(tokens=(n,), seconds=1.0, peak_bytes=1e6 + float(n) ** 2) for n in LENGTHS
    ]
    assert fit_bytes(squares, "vision").held_out.largest > 0.2


def test_without_peaks_there_is_no_memory_and_few_of_them_are_refused():
    plain = measured(ContextCost.flexsp_7b())
    assert fit_bytes(plain, "llm") is None
    few = [replace(m, peak_bytes=1e6) for m in plain[:3]]
    with pytest.raises(PlanningError, match="memory of llm was measured at 1 different loads"):
        fit_bytes([*few, *plain[3:]], "llm")
