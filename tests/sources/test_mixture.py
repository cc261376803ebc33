"""The mixture: conservation over epochs, weights, batches, and being pure."""

import threading
import tracemalloc
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from dataservice.core.cursor import Cursor
from dataservice.core.errors import CursorMismatchError, SpecError
from dataservice.core.job import BatchSize, MixtureChange
from dataservice.core.ports import Draw
from dataservice.sources.interleave import Interleaving
from dataservice.sources.mixture import Mixture


def draws(mixture: Mixture, batch: BatchSize) -> Iterator[Draw]:
    """All steps of a mixture."""
    place = Cursor()
    while len((draw := draw_at(mixture, place, batch)).sample_ids):
        yield draw
        place = behind(place, draw)


def draw_at(mixture: Mixture, place: Cursor, batch: BatchSize) -> Draw:
    return mixture.draw(epoch=place.epoch, position=place.position, batch=batch, begun=place.begun)


def samples_of(mixture: Mixture, epoch: int) -> int:
    """How many samples an epoch holds."""
    drawn = mixture.drawn(Cursor(epoch=epoch))
    return int((drawn.through_epoch - drawn.before_epoch).sum())


def behind(place: Cursor, draw: Draw) -> Cursor:
    """The place of the next step."""
    return Cursor(
        step=place.step + 1,
        epoch=draw.next_epoch,
        position=draw.next_position,
        begun=draw.next_begun,
    )


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
    assert sum(seen.values()) == sum(samples_of(mixture, e) for e in range(epochs))


@settings(max_examples=60, deadline=None)
@given(sources, st.integers(1, 4), st.integers(1, 40), st.integers(0, 3))
def test_what_lies_before_a_place_is_what_is_drawn_before_it(
    given_sources: list[tuple[int, float]], epochs: int, samples: int, seed: int
) -> None:
    sizes, weights = zip(*given_sources, strict=True)
    mixture = Mixture(sizes, weights, seed=seed, epochs=epochs)
    steps = list(draws(mixture, BatchSize(samples=samples)))
    ids = np.concatenate([np.zeros(0, dtype=np.int64), *(step.sample_ids for step in steps)])
    of = np.concatenate([np.zeros(0, dtype=np.int64), *(step.epoch for step in steps)])

    def counts(some: np.ndarray) -> list[int]:
        numbers = np.searchsorted(np.cumsum(sizes), some, side="right")
        return np.bincount(numbers, minlength=len(sizes)).tolist()

    place, passed = Cursor(), 0
    for step in [None, *steps]:
        if step is not None:
            place, passed = behind(place, step), passed + len(step.sample_ids)
        now = mixture.drawn(place)
        epoch = min(place.epoch, epochs - 1)
        assert now.so_far.tolist() == counts(ids[:passed])
        assert now.before_epoch.tolist() == counts(ids[of < epoch])
        assert now.through_epoch.tolist() == counts(ids[of <= epoch])
        assert now.in_all.tolist() == counts(ids)


def test_half_weight_shows_each_sample_once_in_two_epochs() -> None:
    seen = visits(Mixture([7], [0.5], seed=1, epochs=6), BatchSize(samples=3))
    for pair in range(3):
        assert [seen[2 * pair, row] + seen[2 * pair + 1, row] for row in range(7)] == [1] * 7


def test_weight_one_is_a_permutation_of_all_sources_mixed() -> None:
    mixture = Mixture([500, 500], [1, 1], seed=3, epochs=1)
    draw = mixture.draw(epoch=0, position=0, batch=BatchSize(samples=1000))
    assert sorted(draw.sample_ids.tolist()) == list(range(1000))
    assert 200 < (draw.sample_ids[:500] < 500).sum() < 300


PINNED = [[3, 1, 2, 4, 5, 0], [5, 4, 2, 0, 1, 3], [0, 2, 5, 4, 1, 3]]


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
    assert orders == PINNED


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
        twelfths = [(each >= 6000).mean() for each in np.split(ids, 12)]
        assert 0.245 < min(twelfths) <= max(twelfths) < 0.255  # of 1,000 samples each


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


@pytest.mark.parametrize(("epoch", "position"), [(-1, 0), (3, 0), (0, 6), (0, -1), (2, 1)])
def test_a_place_that_does_not_exist_is_refused(epoch: int, position: int) -> None:
    mixture = Mixture([5], [1], seed=0, epochs=2)
    with pytest.raises(CursorMismatchError, match=f"{max(epoch, position) or -1}"):
        mixture.draw(epoch=epoch, position=position, batch=BatchSize(samples=1))
    with pytest.raises(CursorMismatchError):
        mixture.drawn(Cursor(epoch=epoch, position=position))


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


# ---- changes of the mixture ---------------------------------------------------------------

NAMES = ("a", "b", "c", "d")
any_weight = st.sampled_from([0.0, 0.1, 0.5, 0.7, 1.0, 2.0, 3.3])


@st.composite
def any_changes(draw: st.DrawFn) -> list[tuple[dict[int, float], int, bool]]:
    """Weights by the number of a source, a step or an epoch, and whether it is a step."""
    weights = st.dictionaries(st.integers(0, 3), any_weight, min_size=1)
    return draw(st.lists(st.tuples(weights, st.integers(1, 12), st.booleans()), max_size=5))


def changed(
    sizes: Sequence[int],
    weights: Sequence[float],
    changes: Sequence[tuple[dict[int, float], int, bool]],
    **more: object,
) -> Mixture:
    """A mixture with those of the changes that name its sources and leave one a weight."""
    names, kept, now = NAMES[: len(sizes)], {}, list(weights)
    for number, (given_weights, first, by_step) in enumerate(changes):
        mine = {source: w for source, w in given_weights.items() if source < len(sizes)}
        after = [mine.get(source, weight) for source, weight in enumerate(now)]
        if mine and any(after):
            now = after
            place = {"from_step": first} if by_step else {"from_epoch": first}
            by_name = {NAMES[source]: weight for source, weight in mine.items()}
            kept[f"change{number}"] = MixtureChange(weights=by_name, **place)
    mixture = Mixture(sizes, weights, names=names, changes=kept, **more)
    try:
        mixture.require_weights()
    except SpecError as error:  # of changes by step alone, some may leave none
        assert "nothing is left to train" in str(error)  # noqa: PT017
        reject()
    return mixture


def trained(mixture: Mixture, batch: BatchSize) -> Iterator[tuple[Cursor, Draw]]:
    """All steps as a job draws them, each with its place; until no source has a weight."""
    place = mixture.begin_changes(Cursor())
    try:
        while len((draw := draw_at(mixture, place, batch)).sample_ids):
            yield place, draw
            place = mixture.begin_changes(behind(place, draw))
    except SpecError as error:
        assert "nothing is left to train" in str(error)  # noqa: PT017


def given_by_sample(sizes: Sequence[int], ids: np.ndarray) -> list[np.ndarray]:
    """How often each sample of each source is among these."""
    counts = np.bincount(ids, minlength=sum(sizes))
    return np.split(counts, np.cumsum(sizes)[:-1])


@settings(max_examples=150, deadline=None)
@given(sources, st.integers(1, 4), batches, st.integers(0, 3), any_changes())
def test_no_sample_comes_again_before_all_others_of_its_source_whatever_changes(
    given_sources: list[tuple[int, float]],
    epochs: int,
    batch: BatchSize,
    seed: int,
    changes: list[tuple[dict[int, float], int, bool]],
) -> None:
    sizes, weights = zip(*given_sources, strict=True)
    tokens = (np.arange(sum(sizes), dtype=np.int32) * 37) % 50 + 1
    mixture = changed(sizes, weights, changes, seed=seed, epochs=epochs, llm_tokens=tokens)
    ids = np.zeros(0, dtype=np.int64)
    for place, draw in trained(mixture, batch):
        so_far = mixture.drawn(place).so_far.tolist()
        assert so_far == [int(each.sum()) for each in given_by_sample(sizes, ids)]
        ids = np.concatenate([ids, draw.sample_ids])
        for each in given_by_sample(sizes, ids):
            assert each.max() - each.min() <= 1


@settings(max_examples=100, deadline=None)
@given(sources, st.integers(1, 3), st.integers(1, 30), any_changes(), st.integers(0, 9))
def test_a_place_alone_says_what_comes_next(
    given_sources: list[tuple[int, float]],
    epochs: int,
    samples: int,
    changes: list[tuple[dict[int, float], int, bool]],
    seed: int,
) -> None:
    sizes, weights = zip(*given_sources, strict=True)
    batch = BatchSize(samples=samples)
    mixture = changed(sizes, weights, changes, seed=seed, epochs=epochs)
    for place, draw in list(trained(mixture, batch))[::-1]:
        saved = Cursor.from_json(place.to_json())
        again = draw_at(changed(sizes, weights, changes, seed=seed, epochs=epochs), saved, batch)
        assert again.sample_ids.tolist() == draw.sample_ids.tolist()
        assert (again.next_epoch, again.next_position) == (draw.next_epoch, draw.next_position)
        assert again.next_begun == draw.next_begun


@pytest.mark.long
@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 400), min_size=2, max_size=4),
    st.integers(1, 60),
    st.integers(0, 20),
    any_weight,
    st.integers(0, 3),
)
def test_sources_whose_weight_stays_go_on_as_if_nothing_had_changed(
    sizes: list[int], samples: int, step: int, weight: float, seed: int
) -> None:
    weights = [1.0] * len(sizes)
    mixture = changed(sizes, weights, [({0: weight}, step, True)], seed=seed, epochs=3)
    steps = list(trained(mixture, BatchSize(samples=samples)))
    ids = np.concatenate([draw.sample_ids for _, draw in steps])
    epochs = np.concatenate([draw.epoch for _, draw in steps])
    for epoch in range(3):
        for each in given_by_sample(sizes, ids[epochs == epoch])[1:]:
            assert each.tolist() == [1] * len(each)


def test_a_new_weight_counts_for_the_rest_of_the_epoch_and_those_that_follow() -> None:
    sizes, batch = [4000, 4000], BatchSize(samples=100)
    mixture = changed(sizes, [1, 1], [({0: 0.25}, 20, True)], seed=5, epochs=3)
    steps = list(trained(mixture, batch))
    ids = np.concatenate([draw.sample_ids for _, draw in steps])
    epochs = np.concatenate([draw.epoch for _, draw in steps])
    by_epoch = [(ids[epochs == epoch] < 4000).sum() for epoch in range(3)]
    assert by_epoch[0] == pytest.approx(1000 + 0.25 * 3000, abs=3)
    assert by_epoch[1:] == [1000, 1000]
    first = given_by_sample(sizes, ids[ids < 4000])[0]
    assert first.max() == 1  # 3,750 of its 4,000 samples in three epochs, none of them twice
    after = np.concatenate([draw.sample_ids for _, draw in steps[20:50]])
    assert (after < 4000).mean() == pytest.approx(0.2, abs=0.01)


def test_a_source_left_out_comes_back_where_it_was() -> None:
    mixture = changed(
        [300, 300], [1, 1], [({0: 0.0}, 10, True), ({0: 1.0}, 20, True)], seed=1, epochs=2
    )
    steps = list(trained(mixture, BatchSize(samples=15)))
    for place, draw in steps:
        assert (draw.sample_ids < 300).any() == (not 10 <= place.step < 20)
    ids = np.concatenate([draw.sample_ids for _, draw in steps])
    first, second = given_by_sample([300, 300], ids)
    assert first.max() - first.min() <= 1
    assert second.tolist() == [2] * 300


def test_a_source_of_weight_nought_waits_for_its_change() -> None:
    mixture = changed([50, 50], [1, 0], [({1: 1.0}, 1, False)], seed=1, epochs=2)
    draw_0, draw_1 = (draw for _, draw in trained(mixture, BatchSize(samples=50))), []
    ids = [draw.sample_ids.tolist() for draw in draw_0]
    assert sorted(ids[0]) == list(range(50))
    assert sorted(ids[1] + ids[2]) == list(range(100))
    assert draw_1 == []


def test_a_change_begins_with_the_window_that_follows() -> None:
    mixture = changed([50, 50], [1, 1], [({0: 0.5}, 3, True)], seed=1, epochs=2)
    inside = Cursor(step=3, epoch=0, position=10, step_in_window=1)
    assert mixture.begin_changes(inside) == inside
    behind_it = Cursor(step=4, epoch=0, position=20)
    begun = mixture.begin_changes(behind_it)
    assert begun.begun == "change0@0:20"
    assert mixture.begin_changes(begun) == begun


def test_of_changes_at_one_step_the_last_one_counts() -> None:
    rare, often = (MixtureChange(weights={"a": weight}, from_step=2) for weight in (0.1, 3.0))
    mixture = Mixture([50, 50], [1, 1], seed=1, epochs=3, names=["a", "b"])
    mixture = mixture.changed({"r9": rare, "r10": often})
    begun = mixture.begin_changes(Cursor(step=2, epoch=1, position=0))
    ids = draw_at(mixture, begun, BatchSize(samples=200)).sample_ids
    assert (ids < 50).sum() == 150


def test_no_source_gives_more_than_its_most_passes() -> None:
    mixture = Mixture([40, 60], [1, 1], seed=0, epochs=5, max_passes=[1.5, None])
    ids = np.concatenate([draw.sample_ids for draw in draws(mixture, BatchSize(samples=7))])
    first, second = given_by_sample([40, 60], ids)
    assert (int(first.sum()), first.max()) == (60, 2)
    assert second.tolist() == [5] * 60
    assert [samples_of(mixture, epoch) for epoch in range(5)] == [100, 80, 60, 60, 60]


def test_shares_of_tokens_are_shares_of_tokens() -> None:
    sizes = [1000, 300, 2000]
    lengths = np.repeat(np.array([50, 700, 10], dtype=np.int32), sizes)
    tokens = [50_000, 210_000, 20_000]
    mixture = Mixture(sizes, [3, 6, 1], seed=0, epochs=1, share_tokens=tokens)
    ids = np.concatenate([draw.sample_ids for draw in draws(mixture, BatchSize(samples=64))])
    of_source = np.searchsorted(np.cumsum(sizes), ids, side="right")
    shares = np.bincount(of_source, weights=lengths[ids]) / lengths[ids].sum()
    assert shares == pytest.approx([0.3, 0.6, 0.1], abs=0.002)
    assert max(each.max() for each in given_by_sample(sizes, ids)) == 1
    assert np.bincount(of_source)[0] == 1000  # the first to be passed over ends the epoch


@pytest.mark.parametrize(
    "begun",
    ["strange@0:0", "change0", "change0@", "change0@0:-1", "change0@0:1000", "change0@9:0",
     "change0@0:5,change0@0:6", "change0@1:0,change1@0:5", "," * 5000, "change0@0:x"],
)  # fmt: skip
def test_changes_that_never_began_are_refused(begun: str) -> None:
    changes = [({0: 0.5}, 1, True), ({1: 0.5}, 2, True)]
    mixture = changed([50, 50], [1, 1], changes, seed=0, epochs=2)
    with pytest.raises(CursorMismatchError):
        mixture.draw(epoch=1, position=10, batch=BatchSize(samples=1), begun=begun)


def test_a_change_of_a_stranger_or_of_all_weights_to_nought_is_refused() -> None:
    mixture = changed([50, 50], [1, 1], [], seed=0, epochs=2)
    with pytest.raises(SpecError, match="names the source 'x'; the job's are a, b"):
        mixture.changed({"r1": MixtureChange(weights={"x": 1.0}, from_step=3)})
    none = mixture.changed({"r1": MixtureChange(weights={"a": 0.0, "b": 0.0}, from_step=3)})
    with pytest.raises(SpecError, match="nothing is left"):
        none.require_weights()
    late = MixtureChange(weights={"a": 1.0}, from_step=12)
    only_b = Mixture([50, 50], [0, 1], seed=0, epochs=2, names=["a", "b"])
    without = only_b.changed({"r1": late, "r2": MixtureChange(weights={"b": 0.0}, from_step=7)})
    with pytest.raises(SpecError, match="nothing is left"):
        without.require_weights()


def test_a_source_that_an_epoch_brings_in_may_stay_alone_from_a_step_on() -> None:
    """Whether the epoch comes first is known where the step is drawn: there it is refused, until
    another change gives a source a weight."""
    by_epoch = MixtureChange(weights={"b": 1.0}, from_epoch=1)
    no_a = {"weights": {"a": 0.0}}
    for step, sound in ((8, True), (3, False)):
        changes = {"f0": by_epoch, "r1": MixtureChange(**no_a, from_step=step)}
        mixture = Mixture([50, 50], [1, 0], seed=0, epochs=3, names=["a", "b"], changes=changes)
        mixture.require_weights()
        batch, ends = BatchSize(samples=10), 0
        ids = []
        for place, draw in trained(mixture, batch):
            ids.append(draw.sample_ids)
            ends = place.step + 1
        given = np.bincount(np.concatenate(ids), minlength=100)
        if sound:
            assert given[50:].tolist() == [2] * 50
            continue
        assert ends == 3
        mended = mixture.changed({"r2": MixtureChange(weights={"a": 1.0}, from_step=3)})
        mended.require_weights()
        place = mended.begin_changes(behind(place, draw))
        assert set(draw_at(mended, place, batch).sample_ids) <= set(range(50))
    gone = {**changes, "r2": MixtureChange(weights={"a": 0.0, "b": 0.0}, from_step=9)}
    with pytest.raises(SpecError, match="nothing is left"):
        mixture.changed(gone).require_weights()


def test_epochs_without_samples_cost_nothing() -> None:
    mixture = Mixture([100, 7], [1, 1e-6], seed=1, epochs=10**6, max_passes=[1, None])
    draw = mixture.draw(epoch=0, position=0, batch=BatchSize(samples=104))
    assert draw.epoch.tolist() == [0] * 100 + [71428, 214285, 357142, 500000 - 1]
    assert mixture.draw(epoch=900_000, position=0, batch=BatchSize(samples=9)).next_epoch == 10**6
    all_given = Mixture([100], [1], seed=1, epochs=10**6, max_passes=[1])
    draw = all_given.draw(epoch=0, position=0, batch=BatchSize(samples=256))
    assert (len(draw.sample_ids), draw.next_epoch) == (100, 10**6)


def test_a_draw_takes_no_more_memory_in_late_epochs() -> None:
    mixture = Mixture([1, 10_000], [1000, 1], seed=1, epochs=10**6)
    tracemalloc.start()
    drawn = mixture.draw(epoch=900_000, position=0, batch=BatchSize(samples=256))
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(drawn.sample_ids) == 256
    assert peak_bytes < 2_000_000


def test_an_epoch_that_was_added_begins_with_its_changes() -> None:
    changes = {"file0": MixtureChange(weights={"b": 0.0}, from_epoch=2)}

    def made(epochs: int) -> Mixture:
        return Mixture([10, 10], [1, 1], seed=1, epochs=epochs, names=["a", "b"], changes=changes)

    *_, (place, last) = trained(made(2), BatchSize(samples=8))
    end = behind(place, last)
    longer = made(4).draw(
        epoch=end.epoch, position=end.position, begun=end.begun, batch=BatchSize(samples=30)
    )
    assert (end.epoch, sorted(longer.sample_ids.tolist())) == (2, sorted([*range(10), *range(10)]))


def test_the_largest_epoch_is_that_of_the_greatest_weights() -> None:
    mixture = Mixture([1000, 1000], [1000, 1], seed=0, epochs=9, names=["a", "b"])
    late = MixtureChange(weights={"a": 0.001}, from_step=100)
    early = MixtureChange(weights={"b": 1000.0}, from_step=50)
    assert mixture.changed({"r1": late, "r2": early}).largest_epoch == 2_000_000


# ---- sources and changes that are appended ------------------------------------------------

added_sources = st.lists(st.integers(1, 30), min_size=1, max_size=3)


@pytest.mark.long
@settings(max_examples=150, deadline=None)
@given(
    sources,
    added_sources,
    st.integers(1, 4),
    batches,
    st.integers(0, 3),
    any_changes(),
    st.booleans(),
)
def test_sources_appended_with_weight_nought_move_no_sample_and_no_place(
    given_sources: list[tuple[int, float]],
    added: list[int],
    epochs: int,
    batch: BatchSize,
    seed: int,
    changes: list[tuple[dict[int, float], int, bool]],
    shares: bool,
) -> None:
    sizes, weights = map(list, zip(*given_sources, strict=True))
    changes = [({k: w for k, w in c.items() if k < len(sizes)}, *when) for c, *when in changes]
    tokens = (np.arange(sum(sizes) + sum(added), dtype=np.int32) * 37) % 50 + 1

    def mixture(sizes: list[int], weights: list[float]) -> Mixture:
        return changed(
            sizes,
            weights,
            changes,
            seed=seed,
            epochs=epochs,
            llm_tokens=tokens[: sum(sizes)],
            share_tokens=[7 * size for size in sizes] if shares else None,
        )

    before = mixture(sizes, weights)
    after = mixture([*sizes, *added], [*weights, *[0.0] * len(added)])
    steps = list(trained(before, batch))
    grown = list(trained(after, batch))
    assert [place for place, _ in grown] == [place for place, _ in steps]
    for (place, one), (_, other) in zip(steps, grown, strict=True):
        assert one.sample_ids.tolist() == other.sample_ids.tolist()
        assert one.epoch.tolist() == other.epoch.tolist()
        counts, more = before.drawn(place), after.drawn(place)
        for name in ("before_epoch", "so_far", "through_epoch", "in_all"):
            assert getattr(more, name).tolist() == [
                *getattr(counts, name).tolist(),
                *[0] * len(added),
            ]


@settings(max_examples=100, deadline=None)
@given(
    sources,
    st.integers(1, 30),
    st.integers(1, 4),
    batches,
    st.integers(0, 3),
    st.integers(0, 12),
    st.data(),
)
def test_an_appended_source_is_drawn_from_its_change_on_and_once_a_pass(
    given_sources: list[tuple[int, float]],
    added: int,
    epochs: int,
    batch: BatchSize,
    seed: int,
    first: int,
    data: st.DataObject,
) -> None:
    sizes, weights = map(list, zip(*given_sources, strict=True))
    names = (*NAMES[: len(sizes)], "added")
    tokens = (np.arange(sum(sizes) + added, dtype=np.int32) * 37) % 50 + 1
    with_it: dict[str, object] = {"seed": seed, "epochs": epochs, "names": names}
    whole = Mixture([*sizes, added], [*weights, 0.0], llm_tokens=tokens, **with_it)  # type: ignore[arg-type]
    steps = list(trained(whole, batch))
    brings_in = {"brought": MixtureChange(weights={"added": 1.0}, from_step=first)}
    changed_steps = list(trained(whole.changed(brings_in), batch))
    for (place, one), (also, other) in zip(steps[:first], changed_steps[:first], strict=False):
        assert place == also
        assert one.sample_ids.tolist() == other.sample_ids.tolist()
    counts = np.zeros(added, dtype=np.int64)
    for _, draw in changed_steps:
        mine = draw.sample_ids[draw.sample_ids >= sum(sizes)] - sum(sizes)
        np.add.at(counts, mine, 1)
        assert counts.max() - counts.min() <= 1
    if changed_steps:  # whoever resumes anywhere draws the rest
        place, draw = data.draw(st.sampled_from(changed_steps))
        again = draw_at(whole.changed(brings_in), place, batch)
        assert again.sample_ids.tolist() == draw.sample_ids.tolist()


def test_a_change_appended_after_its_epoch_had_begun_begins_where_the_job_goes_on() -> None:
    before = Mixture([40, 40], [1, 0], seed=0, epochs=3, names=("a", "b"))
    place = next(place for place, _ in trained(before, BatchSize(samples=16)) if place.step == 4)
    assert (place.epoch, place.position) == (1, 24)
    late = before.changed({"file0": MixtureChange(weights={"b": 1.0}, from_epoch=1)})
    begun = late.begin_changes(place)
    assert begun.begun == "file0@1:24"
    assert late.begin_changes(begun) == begun
    rest = draw_at(late, begun, BatchSize(samples=200)).sample_ids
    counts = np.bincount(rest, minlength=80)
    assert counts[:40].sum() == 16 + 40
    assert counts[40:].sum() == 16 + 40, "as much of its epoch as is left, and the one behind"
    assert set(counts[40:]) == {1, 2}


@given(st.lists(st.integers(1, 900), min_size=1, max_size=4), st.integers(1, 40), st.data())
@settings(max_examples=30)
def test_small_draws_are_of_the_same_order_as_one_of_the_whole_epoch(sizes, step, data):
    weights = [data.draw(st.sampled_from([0.3, 1.0, 2.0])) for _ in sizes]
    mixture, whole = (Mixture(sizes, weights, seed=3, epochs=3) for _ in range(2))
    places = [(epoch, at) for epoch in range(3) for at in range(0, samples_of(whole, epoch), step)]
    for epoch, at in data.draw(st.permutations(places))[:60]:  # as several jobs would draw by turns
        end = min(at + step, samples_of(whole, epoch))
        drawn = mixture.draw(epoch=epoch, position=at, batch=BatchSize(samples=end - at))
        all_of_it = whole.draw(epoch=epoch, position=0, batch=BatchSize(samples=10_000))
        assert drawn.sample_ids.tolist() == all_of_it.sample_ids[at:end].tolist()


def test_small_draws_find_their_place_in_the_order_once_for_many(monkeypatch):
    asked: list[int] = []
    turns = Interleaving.turns

    def noted(of: Interleaving, start: int, end: int):
        asked.append(end - start)
        return turns(of, start, end)

    monkeypatch.setattr(Interleaving, "turns", noted)
    mixture = Mixture([2048], [1.0], seed=1, epochs=1)
    drawn = [draw.sample_ids for draw in draws(mixture, BatchSize(samples=32))]
    assert sorted(np.concatenate(drawn).tolist()) == list(range(2048))
    assert asked == [1024, 1024]
