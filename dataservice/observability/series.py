"""The series of a registry as data, against which dashboards, alerts and documents are tested."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Metric

SHOWN = {
    "counter": ("_total",),
    "histogram": ("_bucket", "_sum", "_count"),
    "gauge": ("",),
}
"""The endings that a scrape adds to a name, by kind; the first stands for all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """A metric: `kind` is counter, gauge or histogram."""

    name: str
    kind: str
    text: str
    labels: tuple[str, ...]

    @property
    def shown(self) -> str:
        """Its name in documents: as it is scraped, but a histogram's without an ending."""
        return self.name + ("_total" if self.kind == "counter" else "")

    @property
    def scraped(self) -> tuple[str, ...]:
        """Every name under which it is scraped."""
        return tuple(self.name + ending for ending in SHOWN[self.kind])


def series_of(registry: CollectorRegistry) -> Iterator[Series]:
    """All series that a registry may show, whether or not they have values yet."""
    for collector in dict.fromkeys(registry._collector_to_names):
        for family in collector.describe():  # type: ignore[attr-defined]
            # prometheus_client keeps labels in its own metrics, else in what they describe.
            labels = tuple(getattr(collector, "_labelnames", ()) or _labels_of(family))
            yield Series(
                name=family.name, kind=family.type, text=family.documentation, labels=labels
            )


def _labels_of(family: Metric) -> Sequence[str]:
    return getattr(family, "_labelnames", ())
