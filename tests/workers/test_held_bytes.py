from hypothesis import given, settings
from hypothesis import strategies as st

from dataservice.core.orders import PackKey
from dataservice.workers.held_bytes import HeldBytes


def key(step, pack=0, job="j"):
    return PackKey(job=job, step=step, plan_digest="d", pack=pack)


def test_a_pack_that_fits_is_let_in_and_one_that_does_not_waits_for_room():
    held = HeldBytes(100)
    assert held.add(key(0), 60)
    assert held.add(key(1), 30)
    assert not held.add(key(2), 30)
    assert not held.add(key(3), 10), "it would fit, but is needed later than one that waits"
    assert (held.held_bytes, held.waiting) == (90, 2)
    assert held.remove([key(0)]) == [key(2), key(3)]
    assert (held.held_bytes, held.waiting) == (70, 0)


def test_the_first_step_of_every_job_is_let_in_whatever_is_held():
    held = HeldBytes(100)
    assert held.add(key(5), 1000)
    assert held.add(key(5, pack=1), 1000)
    assert held.add(key(9, job="other"), 1000)
    assert not held.add(key(6), 1)
    assert held.add(key(4), 1000), "an earlier step is the first from now on"


def test_a_pack_that_a_rank_asks_for_is_let_in_whatever_is_held():
    held = HeldBytes(100)
    held.add(key(0), 100)
    held.add(key(1), 50)
    assert held.ask(key(1))
    assert not held.ask(key(1)), "only once"
    assert not held.ask(key(7)), "not ordered here"
    assert held.held_bytes == 150


def test_room_goes_to_what_is_needed_soonest_and_small_packs_do_not_overtake():
    held = HeldBytes(100)
    for job in ("a", "b"):
        held.add(key(0, job=job), 50)
    for step, size in [(3, 1), (2, 80), (1, 30)]:
        held.add(key(step, job="a"), size)
    held.add(key(1, job="b"), 10)
    # Both jobs now begin at step 1; step 3, though it would fit, waits behind step 2.
    assert held.remove([key(0, job="a"), key(0, job="b")]) == [key(1, job="a"), key(1, job="b")]
    assert held.remove([key(1, job="b")]) == []
    assert held.remove([key(1, job="a")]) == [key(2, job="a"), key(3, job="a")]


def test_an_earlier_step_of_a_job_lets_others_in_that_waited_behind_its_later_ones():
    held = HeldBytes(100)
    held.add(key(0, job="a"), 50)
    held.add(key(1, job="b"), 20)
    assert held.add(key(2, job="b"), 40) == []
    assert held.add(key(1, job="a"), 10) == [], "it would fit, and is needed no sooner"
    assert held.add(key(0, job="b"), 10) == [key(0, job="b"), key(1, job="a")]
    assert (held.held_bytes, held.waiting) == (90, 1)


def test_what_is_released_before_it_was_let_in_leaves_no_trace():
    held = HeldBytes(10)
    held.add(key(0), 10)
    held.add(key(1), 10)
    assert held.remove([key(1), key(1), key(8)]) == []
    assert held.remove([key(0)]) == []
    assert (held.held_bytes, held.waiting) == (0, 0)
    assert held.add(key(1), 10)


operations = st.one_of(
    st.tuples(st.just("add"), st.integers(0, 4), st.integers(0, 2), st.integers(1, 60)),
    st.tuples(st.just("ask"), st.integers(0, 4), st.integers(0, 2)),
    st.tuples(st.just("remove"), st.integers(0, 4), st.integers(0, 2)),
)


@settings(deadline=None, max_examples=300)
@given(st.lists(st.tuples(st.sampled_from("ab"), operations), max_size=40))
def test_nothing_that_is_needed_waits_and_what_waits_has_no_room(history):
    held, sizes, inside, asked = HeldBytes(100), {}, set(), set()
    for job, (act, step, pack, *size) in history:
        name = key(step, pack, job)
        if act == "add" and name not in sizes:
            sizes[name] = size[0]
            inside |= set(held.add(name, size[0]))
        elif act == "ask" and name in sizes:
            asked.add(name)
            if held.ask(name):
                inside.add(name)
        elif act == "remove":
            inside |= set(held.remove([name]))
            sizes.pop(name, None)
            inside.discard(name)
            asked.discard(name)
        first = {each.job: min(k.step for k in sizes if k.job == each.job) for each in sizes}
        outside = set(sizes) - inside
        assert held.held_bytes == sum(sizes[each] for each in inside)
        assert held.waiting == len(outside)
        assert not outside & asked
        assert all(each.step > first[each.job] for each in outside)
        if outside:
            ahead = {each: each.step - first[each.job] for each in outside}
            soonest = [each for each in outside if ahead[each] == min(ahead.values())]
            assert any(held.held_bytes + sizes[each] > 100 for each in soonest)


@settings(deadline=None, max_examples=100)
@given(
    limit=st.integers(1, 300),
    ready=st.integers(1, 5),
    ranks=st.integers(1, 4),
    packs=st.integers(1, 5),
    order=st.randoms(use_true_random=False),
)
def test_trainers_always_go_on_whichever_rank_is_ahead(limit, ready, ranks, packs, order):
    """Ranks fetch their steps one after another; a step is released when all have it."""
    held, inside, steps = HeldBytes(limit), set(), 12
    ordered, released, at = 0, 0, [0] * ranks
    while min(at) < steps:
        while ordered < min(steps, released + ready):
            for pack in range(packs):
                inside |= set(held.add(key(ordered, pack), order.randint(1, 100)))
            ordered += 1
        can = [rank for rank in range(ranks) if at[rank] < ordered]
        rank = order.choice(can)
        wanted = {key(at[rank], pack) for pack in range(packs) if pack % ranks == rank % packs}
        inside |= {each for each in wanted if held.ask(each)}
        assert wanted <= inside
        at[rank] += 1
        while released < min(at):
            done = [key(released, pack) for pack in range(packs)]
            inside |= set(held.remove(done))
            released += 1
