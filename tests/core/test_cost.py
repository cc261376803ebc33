import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataservice.core.cost import ContextCost, PhaseCost
from dataservice.core.errors import PlanningError
from dataservice.core.layout import padded_tokens
from dataservice.planning.context.seconds import (
    attention_seconds,
    fixed_seconds,
    group_seconds,
    passing_seconds,
    ring_seconds,
    work_seconds,
)

COST = ContextCost(
    attention_s_per_token2=2e-9,
    linear_s_per_token=1e-4,
    group_s=0.5,
    ring_intra_s_per_token=4e-6,
    ring_inter_s_per_token=3e-5,
    ring_hop_s=1e-5,
)


def spelled_out(tokens: list[int], degree: int, share: list[float], crosses: bool) -> float:
    """DHP eq. 8–10 term by term."""
    chunk = 2 * degree if degree > 1 else 1
    padded = [-(-t // chunk) * chunk for t in tokens]
    attention = sum(2e-9 * (1 + e) * t * t for t, e in zip(padded, share, strict=True)) / degree
    compute = attention + sum(1e-4 * t for t in padded) / degree + 0.5
    rate = 3e-5 if crosses else 4e-6
    ring = rate * sum(padded) * (degree - 1) / degree + 1e-5 * (degree - 1)
    return compute + ring - min(attention, ring)


@settings(deadline=None)
@given(
    samples=st.lists(st.tuples(st.integers(1, 200_000), st.floats(0, 1)), min_size=1, max_size=6),
    degree=st.integers(1, 70),
    crosses=st.booleans(),
)
def test_a_group_costs_what_the_paper_says(samples, degree, crosses):
    tokens = [t for t, _ in samples]
    share = [e for _, e in samples]
    expected = spelled_out(tokens, degree, share, crosses)
    assert COST.time_s(tokens, degree, share, crosses) == pytest.approx(expected, rel=1e-9)


def costs():
    """Cost models of any size, rings that cross nodes slower by any factor, each term also 0, but
    not all of what one replica takes."""
    terms = [st.sampled_from([0.0, 1e-10, 5.128e-9, 3e-7])]
    terms += [st.sampled_from([0.0, 1.84e-4, 3e-3]), st.sampled_from([0.0, 0.02, 0.629])]
    terms += [st.sampled_from([0.0, 5e-6, 2e-4]), st.sampled_from([1.0, 1.7, 400.0])]
    terms += [st.sampled_from([0.0, 2e-5, 0.01])]
    return (
        st.tuples(*terms)
        .filter(lambda term: any(term[:3]))
        .map(
            lambda term: ContextCost(
                attention_s_per_token2=term[0],
                linear_s_per_token=term[1],
                group_s=term[2],
                ring_intra_s_per_token=term[3],
                ring_inter_s_per_token=term[3] * term[4],
                ring_hop_s=term[5],
            )
        )
    )


def same(value):
    return pytest.approx(value, rel=1e-12, abs=0)


@settings(deadline=None, max_examples=300)
@given(
    cost=costs(),
    samples=st.lists(st.tuples(st.integers(1, 200_000), st.floats(0, 1)), max_size=6),
    degree=st.integers(1, 2600),
    crosses=st.booleans(),
)
def test_the_kernel_and_the_model_of_arrays_are_one_formula(cost, samples, degree, crosses):
    tokens = np.array([t for t, _ in samples], dtype=np.int64)
    share = np.array([e for _, e in samples])
    padded = padded_tokens(tokens, degree).astype(float)
    total, squares = float(padded.sum()), float(((1 + share) * padded * padded).sum())
    kernel = group_seconds(total, squares, degree, crosses, cost.coefficients)
    assert kernel == same(cost.time_s(tokens, degree, share, crosses))
    assert kernel == same(float(cost.group_times_s(total, squares, degree, crosses)))
    for one in padded:
        alone = group_seconds(float(one), float(one) ** 2, degree, False, cost.coefficients)
        assert alone == same(cost.alone_s([int(one)], degree)[0])


@settings(deadline=None)
@given(
    cost=costs(),
    tokens=st.integers(1, 200_000),
    share=st.floats(0, 1),
    degree=st.integers(1, 2600),
    crosses=st.booleans(),
)
def test_work_attention_and_ring_are_the_parts_of_that_formula(
    cost, tokens, share, degree, crosses
):
    total, squares = float(tokens), (1 + share) * float(tokens) ** 2
    coefficients = cost.coefficients
    work = work_seconds(total, squares, coefficients)
    assert work == same(cost.work_s([tokens], [share])[0])
    assert work + fixed_seconds(coefficients) == same(cost.time_s([tokens], 1, [share]))
    linear = work_seconds(total, 0.0, coefficients)
    attention = attention_seconds(squares, coefficients)
    assert work == same(linear + attention)
    ring = ring_seconds(total, degree, crosses, coefficients)
    hops = ring_seconds(0.0, degree, crosses, coefficients)
    assert degree * ring == same(
        passing_seconds(degree, crosses, coefficients) * total + degree * hops
    )
    assert group_seconds(total, squares, degree, crosses, coefficients) == same(
        linear / degree + fixed_seconds(coefficients) + max(attention / degree, ring)
    )


def test_times_over_degrees_are_the_single_times():
    degrees = [1, 2, 5, 9]
    crosses = [False, False, False, True]
    many = COST.times_s([5000, 70], degrees, crosses_node=crosses)
    single = [
        COST.time_s([5000, 70], d, crosses_node=c) for d, c in zip(degrees, crosses, strict=True)
    ]
    assert many.tolist() == single


def test_full_attention_doubles_attention_and_leaves_the_rest():
    causal = COST.time_s([10_000], 1)
    full = COST.time_s([10_000], 1, [1.0])
    assert full - causal == pytest.approx(2e-9 * 10_000**2)


def test_work_is_the_least_replica_time_at_any_degree():
    tokens = [50_001]
    work = COST.work_s(tokens)[0]
    for degree in range(1, 30):
        assert degree * (COST.time_s(tokens, degree) - 0.5) >= work * (1 - 1e-12)


def test_an_empty_group_takes_only_its_fixed_time():
    assert COST.time_s([], 1) == 0.5


def test_cost_models_come_back_from_their_dictionaries_with_the_same_version():
    phase = PhaseCost(linear_s_per_token=1e-5, quadratic_s_per_token2=1e-9, item_s=1e-3)
    assert ContextCost.from_dict(COST.to_dict()) == COST
    assert ContextCost.from_dict(COST.to_dict()).version == COST.version
    assert PhaseCost.from_dict(phase.to_dict()).version == phase.version
    assert COST.version != ContextCost.flexsp_7b().version


def test_equal_cost_models_have_one_version():
    assert PhaseCost(linear_s_per_token=1.0, item_s=-0.0) == PhaseCost(
        linear_s_per_token=1.0, item_s=0.0
    )
    assert (
        PhaseCost(linear_s_per_token=1.0, item_s=-0.0).version
        == PhaseCost(linear_s_per_token=1.0, item_s=0.0).version
    )


def test_versions_are_stable_across_processes():
    cost = ContextCost(attention_s_per_token2=1.0, linear_s_per_token=2.0)
    assert cost.version == "a88140437d092804"


def test_phase_cost_is_linear_quadratic_and_fixed():
    phase = PhaseCost(linear_s_per_token=2.0, quadratic_s_per_token2=0.5, item_s=3.0)
    assert phase.item_seconds([0, 1, 4]).tolist() == [3.0, 5.5, 19.0]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: COST.time_s([5, 0], 1), "sample 1 has 0 tokens"),
        (lambda: COST.time_s([5], 0), "degree is 0"),
        (lambda: COST.time_s([1.5], 1), "integers"),
        (lambda: COST.time_s([5], 1, [1.5]), "0..1"),
        (lambda: COST.time_s([5], 1, [0.5, 0.5]), "one share a sample"),
        (lambda: ContextCost(attention_s_per_token2=-1, linear_s_per_token=0), "-1"),
        (
            lambda: ContextCost(attention_s_per_token2=0, linear_s_per_token=0, group_s=0),
            "are all 0; plans are made by the decoder's seconds",
        ),
        (lambda: PhaseCost(linear_s_per_token=float("nan")), "nan"),
        (
            lambda: ContextCost(
                attention_s_per_token2=1, linear_s_per_token=1, ring_intra_s_per_token=1
            ),
            "faster",
        ),
        (lambda: ContextCost.from_dict({"linear_s_per_token": 1.0}), "attention_s_per_token2"),
        (lambda: ContextCost.from_dict({**COST.to_dict(), "gamma": 1.0}), "gamma"),
        (lambda: PhaseCost.from_dict({"linear_s_per_token": "x"}), "number"),
        (lambda: PhaseCost(linear_s_per_token=1.0).item_seconds([-1]), "-1"),
    ],
)
def test_bad_values_are_named_with_what_is_allowed(call, words):
    with pytest.raises(PlanningError, match=words):
        call()
