"""Error budgets: how many of a source's last samples were bad, and when that is too many.

Steps are judged in their order, each once the receipts of all its packs are in, however the
workers finish. So the verdict falls at the same step in every run over the same data.

    receipts ─▶ steps, whole and in order ─▶ window of each source ─▶ ErrorBudgetError
"""

import re
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from dataservice.core.errors import ErrorBudgetError
from dataservice.core.job import ErrorBudget
from dataservice.core.order_columns import PackOrders
from dataservice.core.orders import BadSample, PackOrder
from dataservice.core.plan import StepPlan
from dataservice.core.ports import Catalog
from dataservice.core.receipts import PackReceipts

NAMED = 3  # reasons, files and samples of a verdict
REASON_CHARACTERS = 160
EXAMPLE_CHARACTERS = 300
FILE_CHARACTERS = 100
MOST_LOOKED_UP = 1000  # bad samples whose files are counted


def reason_kind(reason: str) -> str:
    """What reasons of one kind have in common: their first sentence, without names and numbers.

    It is a key to count by. People are shown an example of the kind, with its numbers and limits.
    """
    named = re.sub(r"'[^']*'|\"[^\"]*\"|(?<!\w)/\S+", "…", _first_sentence(reason))
    return re.sub(r"\w*\d[\w,.]*", "#", named)[:REASON_CHARACTERS].rstrip(". ")


def reason_example(reason: str) -> str:
    """A reason as it is shown for all of its kind: its first sentence."""
    first = _first_sentence(reason).rstrip(". ")
    return first if len(first) <= EXAMPLE_CHARACTERS else first[: EXAMPLE_CHARACTERS - 2] + " …"


def _first_sentence(reason: str) -> str:
    return re.split(r"\. |\n", reason, maxsplit=1)[0]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedSamples:
    """A step's samples in training order: `sample_ids` int64[n], and `source_of` int64[n], their
    places in `sources`."""

    sources: tuple[str, ...]
    sample_ids: NDArray[np.int64]
    source_of: NDArray[np.int64]

    @staticmethod
    def of(plan: StepPlan, catalog: Catalog) -> "TrainedSamples":
        """The samples of a step, pack by pack."""
        ids = plan.sample_ids[plan.pack_samples]
        return TrainedSamples(
            sources=catalog.source_names, sample_ids=ids, source_of=catalog.source_numbers(ids)
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Bad:
    place: int
    sample_id: int
    key: str
    reason: str


@dataclass(kw_only=True, slots=True)
class SourceWindow:
    """The last samples of one source: how many came, and those among them that were bad."""

    source: str
    budget: ErrorBudget
    samples: int = 0
    bad: deque[_Bad] = field(default_factory=deque)

    def pass_to(self, samples: int) -> None:
        """The number of its samples that are trained by now."""
        self.samples = samples
        oldest = samples - self.budget.window_samples
        while self.bad and self.bad[0].place <= oldest:
            self.bad.popleft()

    def add(self, bad: BadSample) -> bool:
        """The sample reached is bad. Returns whether the budget is passed with it."""
        self.bad.append(
            _Bad(place=self.samples, sample_id=bad.sample_id, key=bad.key, reason=bad.reason)
        )
        return self.used > 1

    @property
    def seen(self) -> int:
        """Samples in the window."""
        return min(self.samples, self.budget.window_samples)

    @property
    def used(self) -> float:
        """Bad samples over those allowed; above 1 the budget is passed."""
        allowed = max(self.budget.rate * self.seen, self.budget.min_bad_samples - 1)
        return len(self.bad) / allowed if allowed else 2.0 * len(self.bad)


@dataclass(kw_only=True, slots=True)
class _Step:
    orders: PackOrders
    samples: TrainedSamples
    missing: set[int]
    bad: dict[int, BadSample] = field(default_factory=dict)


class BudgetTally:
    """The windows of one attempt. `expect` each step in order, `take` receipts in any."""

    def __init__(
        self,
        job: str,
        budgets: Mapping[str, ErrorBudget],
        *,
        files_of: Callable[[NDArray[np.int64]], Sequence[str]],
    ) -> None:
        """`files_of` gives the files of samples, for a verdict."""
        self._job = job
        self.windows: dict[str, SourceWindow] = {}
        self._steps: dict[int, _Step] = {}  # in their order
        self.use(budgets, files_of=files_of)

    def use(
        self,
        budgets: Mapping[str, ErrorBudget],
        *,
        files_of: Callable[[NDArray[np.int64]], Sequence[str]],
    ) -> None:
        """Count the samples of sources that were added too; what was counted stays."""
        self._files_of = files_of
        for source, budget in budgets.items():
            self.windows.setdefault(source, SourceWindow(source=source, budget=budget))

    def expect(self, step: int, orders: Sequence[PackOrder], samples: TrainedSamples) -> None:
        """The next step's packs were ordered; they hold these samples."""
        ordered = PackOrders.of(orders)
        missing = set(ordered.pack.tolist())
        self._steps[step] = _Step(orders=ordered, samples=samples, missing=missing)

    def take(self, receipts: PackReceipts) -> ErrorBudgetError | None:
        """Take workers' receipts of packs. Returns the verdict, once a source has passed its
        budget. A second receipt of a pack, or one that was not expected, is not counted."""
        step = self._steps.get(receipts.step)
        if step is not None and step.orders and receipts.is_of(step.orders.key(0)):
            packs = step.missing.intersection(receipts.pack.tolist())
            step.missing -= packs
            for pack, bad in zip(receipts.bad_pack.tolist(), receipts.bad, strict=True):
                if pack in packs:
                    step.bad[bad.sample_id] = bad
        return self._judge()

    def give_up(self, step: int) -> ErrorBudgetError | None:
        """No more receipts come for a step that every rank has: the packs whose receipts are
        missing count as good."""
        if step in self._steps:
            self._steps[step].missing.clear()
        return self._judge()

    def _judge(self) -> ErrorBudgetError | None:
        while self._steps:
            number, step = next(iter(self._steps.items()))
            if step.missing:
                return None
            del self._steps[number]
            over = self._pass_over(step)
            if over is not None:
                return ErrorBudgetError(self._verdict(over))
        return None

    def _pass_over(self, step: _Step) -> SourceWindow | None:
        """Count a step's samples. Returns the first source whose budget is passed by one of them.
        O(samples), of which only the bad ones are looked at one by one."""
        ids, source_of = step.samples.sample_ids, step.samples.source_of
        windows = [self.windows.get(name) for name in step.samples.sources]
        before = [window.samples if window is not None else 0 for window in windows]
        bad = np.zeros(0, dtype=np.int64)
        if step.bad:
            bad = np.flatnonzero(np.isin(ids, np.fromiter(step.bad, dtype=np.int64)))
        rank = np.zeros(len(bad), dtype=np.int64)  # how many of its source came up to each
        for source in np.unique(source_of[bad]).tolist() if step.bad else ():
            mine = source_of == source
            chosen = mine[bad]
            rank[chosen] = np.cumsum(mine)[bad[chosen]]
        sources = source_of[bad].tolist()
        for place, source, nth in zip(bad.tolist(), sources, rank.tolist(), strict=True):
            window: SourceWindow | None = windows[source]
            if window is not None:
                window.pass_to(before[source] + nth)
                if window.add(step.bad[int(ids[place])]):
                    return window
        counts = np.bincount(source_of, minlength=len(windows)).tolist()
        for window, past, count in zip(windows, before, counts, strict=True):
            if window is not None:
                window.pass_to(past + count)
        return None

    def _verdict(self, window: SourceWindow) -> str:
        budget, bad = window.budget, window.bad
        kinds = Counter(reason_kind(each.reason) for each in bad).most_common(NAMED)
        examples = {reason_kind(each.reason): reason_example(each.reason) for each in bad}
        last = [each.sample_id for each in bad][-MOST_LOOKED_UP:]
        paths = self._files_of(np.array(last, dtype=np.int64))
        files = Counter(path[-FILE_CHARACTERS:] for path in paths).most_common(NAMED)
        return (
            f"source {window.source!r} of job {self._job!r}: {len(bad)} of its last "
            f"{window.seen} samples are bad, {len(bad) / window.seen:.1%}; its error budget is "
            f"{budget.rate:.1%} of {budget.window_samples}, from {budget.min_bad_samples} on. "
            f"Reasons: {'; '.join(f'{examples[kind]} ({count} such)' for kind, count in kinds)}. "
            f"Files: {', '.join(f'{file} ({count})' for file, count in files)}. "
            f"Samples: {', '.join(each.key for each in list(bad)[-NAMED:])}. "
            f"See `dataservice job quarantine {self._job}` for all. Repair the files and restart "
            "the trainers from their checkpoint; or raise error_budget in the job file, submit "
            "it again and restart them; or, without this source, begin a new job."
        )
