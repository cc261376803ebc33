"""The fair queue against a simulated worker: slots that are busy for as long as a sample says."""

import heapq
from collections import Counter, defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataservice.core.fair_share import FairShare, Run
from dataservice.core.orders import PackKey, PackOrder, PackSample
from dataservice.core.sample import SampleLengths, SampleLocation, SampleRef
from dataservice.core.team import TeamShare, team_of
from dataservice.workers.fair_queue import BURST_S, FIRST_GUESS_S, FairQueue

REF = SampleRef(sample_id=0, source="s", key="k", location=SampleLocation(file="f"))


def an_order(job, tokens, *, step=0, pack=0, share=None):
    return PackOrder(
        key=PackKey(job=job, step=step, plan_digest="d", pack=pack),
        degree=1,
        pipeline="{}",
        samples=tuple(
            PackSample(ref=REF, lengths=SampleLengths(llm_tokens=t, loss_tokens=t)) for t in tokens
        ),
        share=share or TeamShare(),
    )


class Worker:
    """Simulated slots. `seconds(task)` is how long a sample truly takes; nobody tells the queue
    before it is over."""

    def __init__(self, slots, seconds):
        self.queue = FairQueue(slots=slots)
        self.slots, self.seconds = slots, seconds
        self.now_s = 0.0
        self.ends = []
        self.begun = []
        self.served_s = defaultdict(float)

    def push(self, *orders):
        for order in orders:
            self.queue.push(order, self.now_s)
        self.fill()

    def fill(self):
        while len(self.ends) < self.slots and (begun := self.queue.next(self.now_s)):
            end_s = self.now_s + self.seconds(begun.task)
            heapq.heappush(self.ends, (end_s, len(self.begun), begun))
            self.begun.append((self.now_s, begun.task))

    def run(self, until_s=float("inf")):
        """Until then, or until nothing is left to do; yields after every event."""
        while True:
            pause_s = self.queue.pause_s(self.now_s) if len(self.ends) < self.slots else None
            wakes_s = self.now_s + pause_s if pause_s is not None else float("inf")
            next_s = min(self.ends[0][0] if self.ends else float("inf"), wakes_s)
            if next_s > until_s or next_s == float("inf"):
                if until_s < float("inf"):
                    self.now_s = until_s
                return
            self.now_s = next_s
            if self.ends and self.ends[0][0] == next_s:
                _, _, begun = heapq.heappop(self.ends)
                seconds = next_s - begun.run.started_s
                self.queue.done(begun, seconds)
                self.served_s[begun.task.key.job] += seconds
            self.fill()
            yield self.now_s

    def finish(self, until_s=float("inf")):
        for _ in self.run(until_s):
            pass
        return self

    def received_s(self, job):
        """Slot-seconds that the job has had so far, those of samples under way included."""
        under_way = [b.run.started_s for _, _, b in self.ends if b.task.key.job == job]
        return self.served_s[job] + sum(self.now_s - start for start in under_way)


def by_tokens(task):
    return task.sample.lengths.llm_tokens / 1000


def of_team(seconds):
    """Every sample of a team takes as long."""
    return lambda task: seconds[team_of(task.key.job)]


@settings(deadline=None, max_examples=150)
@given(
    packs=st.lists(
        st.tuples(
            st.sampled_from(["a/x", "a/y", "b/x", "c/x"]),
            st.lists(st.integers(1, 5000), max_size=6),
        ),
        max_size=12,
    ),
    slots=st.integers(1, 4),
    gaps=st.lists(st.floats(0, 3), min_size=12, max_size=12),
)
def test_every_sample_comes_once_and_no_slot_is_idle_while_one_waits(packs, slots, gaps):
    worker = Worker(slots, by_tokens)
    for pack, ((job, tokens), gap_s) in enumerate(zip(packs, gaps, strict=False)):
        worker.push(an_order(job, tokens, pack=pack))
        for _ in worker.run(until_s=worker.now_s + gap_s):
            assert len(worker.ends) == slots or worker.queue.queued == 0
    worker.finish()
    came = Counter((task.key.pack, task.place) for _, task in worker.begun)
    wanted = {(p, i) for p, (_, tokens) in enumerate(packs) for i in range(len(tokens))}
    assert came == dict.fromkeys(wanted, 1)
    assert sum(each.queued for each in worker.queue.teams()) == 0


@settings(deadline=None, max_examples=150)
@given(
    weights=st.lists(st.floats(0.25, 4), min_size=2, max_size=4),
    longest=st.lists(st.integers(1, 3000), min_size=4, max_size=4),
    seed=st.randoms(use_true_random=False),
    slots=st.integers(1, 3),
)
def test_backlogged_teams_are_served_by_weight_within_one_sample_a_slot(
    weights, longest, seed, slots
):
    """Samples look alike to the queue and take anything up to their team's longest; one that
    is new to it is guessed to be like the others'."""
    lengths_s = {f"t{i}": longest[i] / 1000 for i in range(len(weights))}
    worker = Worker(slots, lambda task: seed.uniform(0, lengths_s[team_of(task.key.job)]))
    most_s = max(100 * FIRST_GUESS_S, *lengths_s.values())
    for i, weight in enumerate(weights):
        worker.push(an_order(f"t{i}/j", [100] * 60, share=TeamShare(weight=weight)))
    # Until some team has no more than it has slots: from there on it is not backlogged.
    for _ in worker.run():
        loads = worker.queue.teams()
        if min(load.queued for load in loads) == 0:
            break
        normal = [worker.received_s(f"t{i}/j") / weight for i, weight in enumerate(weights)]
        for i, one in enumerate(weights):
            for j, other in enumerate(weights):
                assert normal[i] - normal[j] <= slots * most_s * (1 / one + 1 / other) + 1e-6


def test_weights_of_two_to_one_give_two_to_one_however_long_the_samples_are():
    worker = Worker(2, of_team({"long": 1.0, "short": 0.05}))
    worker.push(
        an_order("long/j", [500] * 100, share=TeamShare(weight=2)),
        an_order("short/j", [500] * 2000),
    )
    worker.finish(until_s=30.0)
    ratio = worker.received_s("long/j") / worker.received_s("short/j")
    assert ratio == pytest.approx(2.0, rel=0.07)


def test_an_idle_teams_share_is_lent_and_a_late_team_is_served_at_once():
    worker = Worker(2, of_team({"early": 0.4, "late": 0.4}))
    worker.push(an_order("early/j", [100] * 500))
    worker.finish(until_s=40.1)
    assert worker.received_s("early/j") == pytest.approx(2 * 40.1)
    worker.push(an_order("late/j", [100] * 500, share=TeamShare(weight=3)))
    before = len(worker.begun)
    worker.finish(until_s=80.1)
    assert worker.begun[before][1].key.job == "late/j"
    assert worker.received_s("late/j") == pytest.approx(0.75 * 2 * 40, rel=0.03)


def test_a_team_that_was_away_has_saved_nothing_up():
    worker = Worker(1, of_team({"a": 0.1, "b": 0.1}))
    worker.push(an_order("a/j", [100] * 10), an_order("b/j", [100] * 1000))
    worker.finish(until_s=50)
    worker.push(an_order("a/j", [100] * 1000, pack=1))
    before_s = worker.received_s("a/j")
    worker.finish(until_s=60)
    assert worker.received_s("a/j") - before_s == pytest.approx(5, abs=0.25)


def test_who_leaves_and_comes_back_still_owes_what_it_took():
    """However many others have come and gone meanwhile."""
    shares = FairShare()
    shares.wants("greedy")
    shares.wants("patient")
    run = Run(started_s=0.0, charged_s=1.0)
    shares.begin("greedy", run)
    shares.rests("greedy")
    shares.end("greedy", run, seconds=5.0)
    for number in range(100):
        shares.wants(f"passer-by {number}")
        shares.rests(f"passer-by {number}")
    shares.wants("greedy")
    for second in range(5):
        assert shares.lowest(5.0) == "patient"
        shares.begin("patient", Run(started_s=5.0 + second, charged_s=1.0))
    assert shares.lowest(5.0) == "greedy"


def test_a_team_whose_samples_hang_does_not_take_all_slots():
    """What is overdue is charged while it runs, before anybody knows how long it takes."""
    worker = Worker(4, of_team({"hangs": 60.0, "well": 0.1}))
    worker.push(an_order("well/j", [100] * 20))
    worker.finish()
    worker.push(an_order("hangs/j", [100] * 50), an_order("well/j", [100] * 5000, pack=1))
    before_s = worker.received_s("well/j")
    worker.finish(until_s=worker.now_s + 59)
    assert worker.received_s("well/j") - before_s >= 0.95 * 59


def test_the_jobs_of_a_team_share_equally_whatever_another_team_does():
    worker = Worker(2, of_team({"a": 0.1, "b": 0.3}))
    worker.push(
        an_order("a/one", [100] * 2000),
        an_order("a/two", [100] * 2000),
        an_order("b/j", [100] * 2000),
    )
    worker.finish(until_s=60)
    one, two, other = (worker.received_s(job) for job in ("a/one", "a/two", "b/j"))
    assert one == pytest.approx(two, rel=0.03)
    assert one + two == pytest.approx(other, rel=0.03)


def test_within_a_job_what_is_needed_first_comes_first():
    worker = Worker(1, by_tokens)
    worker.push(an_order("j", [1]))  # takes the slot
    for step, pack in [(3, 1), (1, 4), (3, 0), (1, 2)]:
        worker.push(an_order("j", [10, 20], step=step, pack=pack))
    worker.finish()
    came = [(task.key.step, task.key.pack, task.place) for _, task in worker.begun[1:]]
    assert came == [
        (step, pack, place) for step, pack in [(1, 2), (1, 4), (3, 0), (3, 1)] for place in (0, 1)
    ]


def test_what_is_withdrawn_does_not_come_and_may_be_ordered_again():
    worker = Worker(1, by_tokens)
    first, second = an_order("j", [1] * 3, pack=0), an_order("j", [2] * 2, pack=1)
    worker.push(first, second)
    worker.queue.withdraw(first.key)
    worker.queue.withdraw(first.key)
    assert worker.queue.queued == 2
    worker.push(first)
    worker.finish()
    came = Counter(task.key.pack for _, task in worker.begun)
    assert came == {0: 1 + 3, 1: 2}
    worker.queue.withdraw(second.key)


@pytest.mark.parametrize(
    "seconds", [lambda place: 0.02, lambda place: 3.0, lambda place: 0.1 * 1.02**place]
)
def test_a_limit_holds_even_where_nobody_else_wants_the_slots(seconds):
    """Also for samples that take ever longer, so that every guess is too low."""
    worker = Worker(4, lambda task: seconds(task.place))
    worker.push(an_order("j", [100] * 20_000, share=TeamShare(limit=0.25)))
    worker.finish(until_s=400)
    allowed_s = 0.25 * 4 * 400
    longest_s = seconds(max(task.place for _, task in worker.begun))
    assert worker.received_s("j") == pytest.approx(allowed_s, abs=BURST_S + longest_s)


def test_a_team_at_its_limit_leaves_the_slots_to_others_and_gets_no_credit_for_it():
    worker = Worker(2, lambda task: 0.1)
    worker.push(
        an_order("capped/j", [100] * 4000, share=TeamShare(limit=0.1)),
        an_order("free/j", [100] * 4000),
    )
    worker.finish(until_s=100)
    assert worker.received_s("capped/j") == pytest.approx(20, abs=1)
    assert worker.received_s("free/j") == pytest.approx(180, abs=1)
    # Uncapped, it has its half from now on and no more.
    worker.push(an_order("capped/j", [100], pack=1, share=TeamShare()))
    before_s = worker.received_s("capped/j")
    worker.finish(until_s=110)
    assert worker.received_s("capped/j") - before_s == pytest.approx(10, abs=0.5)


def test_weights_and_limits_follow_the_latest_order():
    worker = Worker(1, lambda task: 0.1)
    worker.push(an_order("a/j", [100] * 3000), an_order("b/j", [100] * 3000))
    worker.finish(until_s=20)
    worker.push(an_order("a/j", [100], pack=1, share=TeamShare(weight=4)))
    before_s = worker.received_s("a/j")
    worker.finish(until_s=120)
    assert worker.received_s("a/j") - before_s == pytest.approx(80, rel=0.03)
