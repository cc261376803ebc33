"""The table of a campaign, printed at the end of `pytest tests/fuzz`, which is `make fuzz`."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from tests.fuzz.campaign import SEED, VERDICTS, Tally

_PROPERTY = "fuzzed"
_WIDTHS = (25, *(max(11, len(word)) for word in ("mutated", *VERDICTS)))


@pytest.fixture
def tally(record_property: Callable[[str, object], None]) -> Tally:
    """Where a campaign says how many cases of a kind ended how."""
    return lambda kind, counts: record_property(_PROPERTY, (kind, dict(counts)))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    counted = dict(_counted(terminalreporter.stats))
    if not counted:
        return
    terminalreporter.write_sep("=", f"fuzzed with FUZZ_SEED={SEED}")
    sums = {word: sum(counts.get(word, 0) for counts in counted.values()) for word in VERDICTS}
    lines = [("kind", "mutated", *VERDICTS), tuple("-" * width for width in _WIDTHS)]
    for kind, counts in (*sorted(counted.items()), ("all", sums)):
        numbers = [counts.get(word, 0) for word in VERDICTS]
        lines.append(
            (kind, f"{sum(numbers):,}", *(f"{number:,}" if number else "" for number in numbers))
        )
    for line in lines:
        cells = " | ".join(map(str.ljust, line, _WIDTHS))
        terminalreporter.write_line(f"| {cells} |")


def _counted(stats: Mapping[str, list[Any]]) -> Iterator[tuple[str, Mapping[str, int]]]:
    for report in (*stats.get("passed", ()), *stats.get("failed", ())):
        yield from (value for name, value in report.user_properties if name == _PROPERTY)
