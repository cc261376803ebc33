"""The mixture: conservation over epochs, weights, batches, and being pure."""

import threading
import tracemalloc
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataservice.core.cursor import Cursor
from dataservice.core.errors import CursorMismatchError, SpecError
from dataservice.core.job import BatchSize
from dataservice.core.ports import Draw
from dataservice.sources.mixture import Mixture


def draws(mixture: Mixture, batch: BatchSize) -> Iterator[Draw]:
    """All steps of a mixture."""
    epoch = position = 0
    while len((draw := mixture.draw(epoch=epoch, position=position, batch=batch)).sample_ids):
        yield draw
        epoch, position = draw.next_epoch, draw.next_position


def visits(mixture: Mixture, batch: BatchSize) -> Counter[tuple[int, int]]:
    """How often each (epoch, sample) is drawn."""
    return Counter(
        (int(epoch), int(sample))
        for draw in draws(mixture, batch)
        for epoch, sample in zip(draw.epoch, draw.sample_ids, strict=True)
    )


sources = st.lists(
    st.tuples(
        st.integers(1, 30),
        st.sampled_from([0.01, 0.1, 0.25, 1 / 3, 0.5, 0.7, 1.0, 1.5, 2.0, 3.3]),
    ),
    min_size=1,
    max_size=4,
)
batches = st.one_of(
    st.integers(1, 40).map(lambda n: BatchSize(samples=n)),
    st.integers(1, 400).map(lambda n: BatchSize(tokens=n)),
)


@settings(max_examples=60, deadline=None)
@given(sources, st.integers(1, 5), batches, st.integers(0, 3))
def test_every_epoch_holds_what_its_weights_say_for_any_batch(
    given_sources: list[tuple[int, float]], epochs: int, batch: BatchSize, seed: int
) -> None:
    sizes, weights = zip(*given_sources, strict=True)
    tokens = (np.arange(sum(sizes), dtype=np.int32) * 37) % 50 + 1
    mixture = Mixture(sizes, weights, seed=seed, epochs=epochs, llm_tokens=tokens)
    seen = visits(mixture, batch)
    offset = 0
    for size, weight in given_sources:
        for epoch in range(epochs):
            counts = [seen[epoch, offset + row] for row in range(size)]
            assert min(counts) >= int(weight)
            assert max(counts) <= int(weight) + 1
        passes = [sum(seen[e, offset + row] for e in range(epochs)) for row in range(size)]
        assert max(passes) - min(passes) <= 1
        assert abs(sum(passes) - epochs * weight * size) <= 0.5 + 1e-9
        offset += size
    assert sum(seen.values()) == sum(mixture.epoch_samples(e) for e in range(epochs))


@settings(max_examples=60, deadline=None)
@given(sources, st.integers(1, 4), st.integers(0, 3), st.data())
def test_what_lies_before_a_place_is_what_is_drawn_before_it(
    given_sources: list[tuple[int, float]], epochs: int, seed: int, data: st.DataObject
) -> None:
    sizes, weights = zip(*given_sources, strict=True)
    mixture = Mixture(sizes, weights, seed=seed, epochs=epochs)
    epoch = data.draw(st.integers(0, epochs - 1))
    end = data.draw(st.integers(0, mixture.epoch_samples(epoch)))
    start = data.draw(st.integers(0, end))
    drawn = list(draws(mixture, BatchSize(samples=7)))
    ids = np.concatenate([np.zeros(0, dtype=np.int64), *(draw.sample_ids for draw in drawn)])
    before = sum(mixture.epoch_samples(each) for each in range(epoch))

    def of_sources(some: np.ndarray) -> list[int]:
        numbers = np.searchsorted(np.cumsum(sizes), some, side="right")
        return np.bincount(numbers, minlength=len(sizes)).tolist()

    assert mixture.drawn_before(epoch).tolist() == of_sources(ids[:before])
    assert mixture.drawn_before(epochs).tolist() == of_sources(ids)
    between = mixture.drawn_between(epoch=epoch, start=start, end=end)
    assert between.tolist() == of_sources(ids[before + start : before + end])


def test_a_long_way_is_counted_in_pieces_that_add_up() -> None:
    sizes = [50_000, 3000, 20]
    mixture = Mixture(sizes, [1, 0.5, 3], seed=2, epochs=2)
    start, end = 17, 51_001
    ids = mixture.draw(epoch=1, position=start, batch=BatchSize(samples=end - start)).sample_ids
    drawn = np.bincount(np.searchsorted(np.cumsum(sizes), ids, side="right"), minlength=3)
    assert mixture.drawn_between(epoch=1, start=start, end=end).tolist() == drawn.tolist()


def test_half_weight_shows_each_sample_once_in_two_epochs() -> None:
    seen = visits(Mixture([7], [0.5], seed=1, epochs=6), BatchSize(samples=3))
    for pair in range(3):
        assert [seen[2 * pair, row] + seen[2 * pair + 1, row] for row in range(7)] == [1] * 7


def test_weight_one_is_a_permutation_of_all_sources_mixed() -> None:
    mixture = Mixture([500, 500], [1, 1], seed=3, epochs=1)
    draw = mixture.draw(epoch=0, position=0, batch=BatchSize(samples=1000))
    assert sorted(draw.sample_ids.tolist()) == list(range(1000))
    assert 200 < (draw.sample_ids[:500] < 500).sum() < 300


def test_epochs_and_seeds_differ_and_the_order_is_pinned() -> None:
    whole = BatchSize(samples=6)
    first = Mixture([4, 2], [1, 1], seed=0, epochs=2)
    orders = [
        first.draw(epoch=0, position=0, batch=whole).sample_ids.tolist(),
        first.draw(epoch=1, position=0, batch=whole).sample_ids.tolist(),
        Mixture([4, 2], [1, 1], seed=1, epochs=2)
        .draw(epoch=0, position=0, batch=whole)
        .sample_ids.tolist(),
    ]
    assert orders == [[4, 0, 2, 3, 5, 1], [4, 5, 2, 0, 3, 1], [5, 2, 4, 0, 3, 1]]


def test_a_draw_takes_memory_for_what_is_drawn_and_not_for_what_there_is() -> None:
    tokens = np.full(30_000_000, 500, dtype=np.int32)
    mixture = Mixture([20_000_000, 10_000_000], [1, 0.5], seed=0, epochs=2, llm_tokens=tokens)
    for batch in (BatchSize(samples=2000), BatchSize(tokens=1_000_000)):
        tracemalloc.start()
        draw = mixture.draw(epoch=1, position=17_000_000, batch=batch)
        _, peak_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert len(draw.sample_ids) == 2000
        assert peak_bytes < 2_000_000  # 1,000 bytes a sample; the epoch's ids would be 200 MB


def test_neighbours_in_a_source_are_not_neighbours_in_the_epoch() -> None:
    mixture = Mixture([6000, 3000], [1.5, 1], seed=2, epochs=3)
    for epoch in range(3):
        ids = mixture.draw(epoch=epoch, position=0, batch=BatchSize(samples=12_000)).sample_ids
        assert (np.abs(np.diff(ids)) == 1).sum() < 15  # 3 are to be expected
        thirds = [(each >= 6000).mean() for each in np.split(ids, 12)]
        assert 0.19 < min(thirds) < 0.25 < max(thirds) < 0.31


@settings(max_examples=40, deadline=None)
@given(sources, batches, st.integers(0, 200))
def test_drawing_is_pure_from_any_place_and_any_instance(
    given_sources: list[tuple[int, float]], batch: BatchSize, seed: int
) -> None:
    sizes, weights = zip(*given_sources, strict=True)
    tokens = np.full(sum(sizes), 7, dtype=np.int32)

    def make() -> Mixture:
        return Mixture(sizes, weights, seed=seed, epochs=3, llm_tokens=tokens)

    epoch = position = 0
    for draw in draws(make(), batch):
        again = make().draw(epoch=epoch, position=position, batch=batch)
        assert again.sample_ids.tolist() == draw.sample_ids.tolist()
        assert again.epoch.tolist() == draw.epoch.tolist()
        epoch, position = draw.next_epoch, draw.next_position
    assert (epoch, position) in ((3, 0), (0, 0))


def test_a_step_crosses_into_the_next_epoch_and_the_last_step_is_short() -> None:
    steps = list(draws(Mixture([5], [1], seed=0, epochs=2), BatchSize(samples=4)))
    assert [s.epoch.tolist() for s in steps] == [[0] * 4, [0, 1, 1, 1], [1, 1]]
    assert [(s.next_epoch, s.next_position) for s in steps] == [(0, 4), (1, 3), (2, 0)]


def test_the_place_behind_an_epoch_is_the_start_of_the_next() -> None:
    mixture = Mixture([5], [1], seed=0, epochs=2)
    draw = mixture.draw(epoch=0, position=0, batch=BatchSize(samples=5))
    assert (draw.next_epoch, draw.next_position) == (1, 0)
    behind = mixture.draw(epoch=0, position=5, batch=BatchSize(samples=5))
    same = mixture.draw(epoch=1, position=0, batch=BatchSize(samples=5))
    assert behind.sample_ids.tolist() == same.sample_ids.tolist()


def test_nothing_is_drawn_at_the_end() -> None:
    draw = Mixture([5], [1], seed=0, epochs=2).draw(epoch=2, position=0, batch=BatchSize(samples=4))
    assert (len(draw.sample_ids), draw.next_epoch, draw.next_position) == (0, 2, 0)
    assert draw.sample_ids.dtype == np.int64
    assert draw.epoch.dtype == np.int32


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=40), st.integers(1, 100))
def test_tokens_are_drawn_while_they_fit_and_at_least_one_sample(
    lengths: list[int], budget: int
) -> None:
    tokens = np.array(lengths, dtype=np.int32)
    mixture = Mixture([len(lengths)], [1], seed=0, epochs=2, llm_tokens=tokens)
    steps = [tokens[s.sample_ids] for s in draws(mixture, BatchSize(tokens=budget))]
    for step, following in zip(steps, [*steps[1:], None], strict=True):
        assert step.sum() <= budget or len(step) == 1
        if following is not None:
            assert step.sum() + following[0] > budget


@settings(max_examples=60, deadline=None)
@given(sources, st.integers(1, 4), st.integers(1, 50))
def test_steps_left_counts_the_steps_that_can_be_drawn(
    given_sources: list[tuple[int, float]], epochs: int, samples: int
) -> None:
    sizes, weights = zip(*given_sources, strict=True)
    mixture, batch = Mixture(sizes, weights, seed=0, epochs=epochs), BatchSize(samples=samples)
    steps = list(draws(mixture, batch))
    places = [(0, 0), *((s.next_epoch, s.next_position) for s in steps)]
    for number, (epoch, position) in enumerate(places):
        window = Cursor(step=number, epoch=epoch, position=position)
        assert mixture.steps_left(window, batch) == len(steps) - number
        inside = Cursor(step=number + 1, epoch=epoch, position=position, step_in_window=1)
        assert mixture.steps_left(inside, batch) == max(0, len(steps) - number - 1)


def test_steps_left_is_unknown_for_batches_of_tokens() -> None:
    assert Mixture([5], [1], seed=0, epochs=1).steps_left(Cursor(), BatchSize(tokens=8)) is None


@pytest.mark.parametrize(("epoch", "position"), [(-1, 0), (3, 0), (0, 6), (0, -1), (2, 1)])
def test_a_place_that_does_not_exist_is_refused(epoch: int, position: int) -> None:
    mixture = Mixture([5], [1], seed=0, epochs=2)
    with pytest.raises(CursorMismatchError, match=f"{max(epoch, position) or -1}"):
        mixture.draw(epoch=epoch, position=position, batch=BatchSize(samples=1))
    with pytest.raises(CursorMismatchError):
        mixture.steps_left(Cursor(epoch=epoch, position=position), BatchSize(samples=1))


def test_drawing_by_tokens_needs_lengths() -> None:
    with pytest.raises(SpecError, match="llm_tokens"):
        Mixture([5], [1], seed=0, epochs=2).draw(epoch=0, position=0, batch=BatchSize(tokens=9))


@pytest.mark.parametrize(
    ("sizes", "weights", "epochs"),
    [([], [], 1), ([1], [1, 1], 1), ([0], [1], 1), ([1], [0], 1), ([1], [1], 0),
     ([1], [float("nan")], 1), ([1], [float("inf")], 1)],
)  # fmt: skip
def test_impossible_mixtures_are_refused(
    sizes: list[int], weights: list[float], epochs: int
) -> None:
    with pytest.raises(SpecError):
        Mixture(sizes, weights, seed=0, epochs=epochs)


def test_lengths_of_another_catalog_are_refused() -> None:
    with pytest.raises(SpecError, match="2 lengths for 5 samples"):
        Mixture([5], [1], seed=0, epochs=1, llm_tokens=np.ones(2, dtype=np.int32))


def test_threads_draw_the_same() -> None:
    mixture = Mixture([3000], [1], seed=0, epochs=6)
    expected = visits(Mixture([3000], [1], seed=0, epochs=6), BatchSize(samples=500))
    results: list[Counter[tuple[int, int]]] = []
    threads = [
        threading.Thread(target=lambda: results.append(visits(mixture, BatchSize(samples=500))))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [expected] * 4


def test_what_was_drawn_cannot_be_changed_by_its_reader() -> None:
    mixture = Mixture([5], [1], seed=0, epochs=1)
    draw = mixture.draw(epoch=0, position=0, batch=BatchSize(samples=5))
    before = draw.sample_ids.tolist()
    draw.sample_ids[:] = 0
    again = mixture.draw(epoch=0, position=0, batch=BatchSize(samples=5))
    assert again.sample_ids.tolist() == before
