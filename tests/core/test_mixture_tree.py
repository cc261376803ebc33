"""A mixture in figures: shares of an epoch, and how often a sample is seen."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataservice.core.mixture_tree import MixtureSource, MixtureTree


def source(
    name: str = "a",
    *,
    samples: int = 10,
    tokens: int = 100,
    weight: float = 1.0,
    max_passes: float | None = None,
) -> MixtureSource:
    return MixtureSource(
        source=name,
        fingerprint="f00",
        samples=samples,
        tokens=tokens,
        weight=weight,
        passes=weight,
        max_passes=max_passes,
    )


mixtures = st.lists(
    st.builds(
        source,
        samples=st.integers(1, 10**9),
        tokens=st.integers(0, 10**12),
        weight=st.floats(1e-3, 100),
    ),
    min_size=1,
    max_size=8,
).map(lambda sources: MixtureTree(epochs=3, sources=tuple(sources)))


@given(mixtures)
def test_the_shares_of_all_sources_are_the_whole(mixture: MixtureTree) -> None:
    assert sum(map(mixture.sample_share, mixture.sources)) == pytest.approx(1)
    tokens = sum(map(mixture.token_share, mixture.sources))
    assert tokens == pytest.approx(1 if mixture.epoch.tokens else 0)


def test_a_weight_counts_passes_over_a_source() -> None:
    half, twice = source("half", samples=30, weight=0.5), source("twice", tokens=50, weight=2)
    mixture = MixtureTree(epochs=3, sources=(half, twice))
    assert (half.epoch.samples, twice.epoch.samples) == (15, 20)
    assert (mixture.epoch.samples, mixture.epoch.tokens) == (35, 150)
    assert mixture.sample_share(half) == pytest.approx(15 / 35)
    assert mixture.token_share(half) == pytest.approx(50 / 150)
    assert (mixture.times_seen(half), mixture.times_seen(twice)) == (1.5, 6)
    assert mixture.times_seen(source(weight=2, max_passes=4.5)) == 4.5
