"""Error budgets: how many of a source's last samples were bad, and when that is too many.

Steps are judged in their order, each once the receipts of all its packs are in, however the
workers finish. So the verdict falls at the same step in every run over the same data.

    receipts ─▶ steps, whole and in order ─▶ window of each source ─▶ ErrorBudgetError
"""

import re
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dataservice.core.errors import ErrorBudgetError
from dataservice.core.job import ErrorBudget
from dataservice.core.orders import BadSample, PackOrder, PackReceipt

NAMED = 3  # reasons, files and samples of a verdict
REASON_CHARACTERS = 160
FILE_CHARACTERS = 100


def reason_kind(reason: str) -> str:
    """What reasons of one kind share: their first sentence, without names, numbers and sums."""
    first = re.split(r"\. |\n", reason, maxsplit=1)[0]
    named = re.sub(r"'[^']*'|\"[^\"]*\"|(?<!\w)/\S+", "…", first)
    return re.sub(r"\w*\d[\w,.]*", "#", named)[:REASON_CHARACTERS].rstrip(". ")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Bad:
    place: int
    step: int
    key: str
    file: str
    reason: str


@dataclass(kw_only=True, slots=True)
class SourceWindow:
    """The last samples of one source: how many came, and those among them that were bad."""

    source: str
    budget: ErrorBudget
    samples: int = 0
    bad: deque[_Bad] = field(default_factory=deque)

    def add(self, step: int, file: str, bad: BadSample | None) -> bool:
        """The next sample in training order; whether the budget is passed with it."""
        self.samples += 1
        oldest = self.samples - self.budget.window_samples
        while self.bad and self.bad[0].place <= oldest:
            self.bad.popleft()
        if bad is None:
            return False
        self.bad.append(
            _Bad(place=self.samples, step=step, key=bad.key, file=file, reason=bad.reason)
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
    orders: Sequence[PackOrder]
    missing: set[int]
    bad: dict[int, BadSample] = field(default_factory=dict)


class BudgetTally:
    """The windows of one attempt. `expect` each step in order, `take` receipts in any."""

    def __init__(self, job: str, budgets: Mapping[str, ErrorBudget]) -> None:
        self._job = job
        self.windows = {
            source: SourceWindow(source=source, budget=budget) for source, budget in budgets.items()
        }
        self._steps: dict[int, _Step] = {}  # in their order

    def expect(self, step: int, orders: Sequence[PackOrder]) -> None:
        """The next step's packs were ordered."""
        self._steps[step] = _Step(orders=orders, missing={order.key.pack for order in orders})

    def take(self, receipt: PackReceipt) -> ErrorBudgetError | None:
        """What a worker says of a pack; the verdict, once a source has passed its budget. A
        pack that is told twice, or was never expected, counts no more."""
        step = self._steps.get(receipt.key.step)
        if step is None or receipt.key.pack not in step.missing:
            return None
        if step.orders[receipt.key.pack].key != receipt.key:
            return None
        step.missing.discard(receipt.key.pack)
        step.bad.update({bad.sample_id: bad for bad in receipt.bad_samples})
        return self._judge()

    def give_up(self, step: int) -> ErrorBudgetError | None:
        """No more receipts come for a step that every rank has: those missing had no bad one."""
        if step in self._steps:
            self._steps[step].missing.clear()
        return self._judge()

    def _judge(self) -> ErrorBudgetError | None:
        while self._steps:
            number, step = next(iter(self._steps.items()))
            if step.missing:
                return None
            del self._steps[number]
            for sample in (sample for order in step.orders for sample in order.samples):
                window = self.windows.get(sample.ref.source)
                bad = step.bad.get(sample.ref.sample_id)
                if window and window.add(number, sample.ref.location.file, bad):
                    return ErrorBudgetError(self._verdict(window))
        return None

    def _verdict(self, window: SourceWindow) -> str:
        budget, bad = window.budget, window.bad
        reasons = Counter(reason_kind(each.reason) for each in bad).most_common(NAMED)
        files = Counter(each.file[-FILE_CHARACTERS:] for each in bad).most_common(NAMED)
        return (
            f"source {window.source!r} of job {self._job!r}: {len(bad)} of its last "
            f"{window.seen} samples are bad, {len(bad) / window.seen:.1%}; its error budget is "
            f"{budget.rate:.1%} of {budget.window_samples}, from {budget.min_bad_samples} on. "
            f"Reasons: {'; '.join(f'{reason} ({count})' for reason, count in reasons)}. "
            f"Files: {', '.join(f'{file} ({count})' for file, count in files)}. "
            f"Samples: {', '.join(each.key for each in list(bad)[-NAMED:])}. "
            f"See `dataservice job quarantine {self._job}` for all. Repair the files and restart "
            "the trainers from their checkpoint; or raise error_budget in the job file, submit "
            "it again and restart them; or, without this source, begin a new job."
        )
