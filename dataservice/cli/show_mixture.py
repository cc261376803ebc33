"""What `job show`, `preview` and `index` print of a mixture: a job as a tree over its sources."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from rich.text import Text

from dataservice.cli.listing import Listing
from dataservice.core.errors import SpecError
from dataservice.core.mixture_tree import MixtureTree

FINGERPRINT_CHARACTERS = 12  # of a source, in a tree; --json has all
NAME_CHARACTERS = 24  # of a source, before the name is folded
NUMBERS = (
    "samples", "tokens", "weight", "samples/epoch", "% samples", "tokens/epoch", "% tokens",
    "times seen",
)  # fmt: skip


def mixture_tree(job: str, mixture: MixtureTree) -> Listing:
    """The job with its totals, and below it each source: what its index holds, what an epoch draws
    from it, and how often each of its samples is seen over all epochs."""
    epochs = f"{mixture.epochs} epoch{'s' if mixture.epochs > 1 else ''}"
    columns = ("source", "content", *NUMBERS)
    words, labels = ("source",), ("content",)
    table = Listing(
        columns, words=words, labels=labels, title=f"mixture, {epochs}", least=NAME_CHARACTERS
    )
    held = [sum(getattr(each, name) for each in mixture.sources) for name in ("samples", "tokens")]
    total = mixture.epoch
    table.add_row(
        job, "", f"{held[0]:,}", f"{held[1]:,}", "",
        _mean(total.samples), "100.0", _mean(total.tokens), "100.0", "",
    )  # fmt: skip
    for each in mixture.sources:
        branch = "└─" if each is mixture.sources[-1] else "├─"
        table.add_row(
            f"{branch} {each.source}",
            each.fingerprint[:FINGERPRINT_CHARACTERS],
            f"{each.samples:,}",
            f"{each.tokens:,}",
            f"{each.weight:g}",
            _mean(each.epoch.samples),
            f"{mixture.sample_share(each):.1%}".rstrip("%"),
            _mean(each.epoch.tokens),
            f"{mixture.token_share(each):.1%}".rstrip("%"),
            f"{mixture.times_seen(each):g}",
        )
    return table


def mixture_shown(job: str, mixture: MixtureTree) -> Iterator[Listing | Text]:
    """The tree, and below it what takes over from its figures, in the order in which it was asked
    for."""
    yield mixture_tree(job, mixture)
    for change in mixture.changes:
        since = (
            f"step {change.from_step}"
            if change.from_epoch is None
            else f"epoch {change.from_epoch}"
        )
        weights = ", ".join(f"{name} {weight:g}" for name, weight in change.weights.items())
        yield Text(f"from {since}: {weights}")


def weights_of(words: Sequence[str]) -> dict[str, float]:
    """Weights by source from SOURCE=WEIGHT each. Raises SpecError."""
    weights: dict[str, float] = {}
    for word in words:
        source, _, number = word.rpartition("=")
        try:
            weight = float(number)
        except ValueError:
            source, weight = "", 0.0
        if not source or source in weights:
            raise SpecError(
                f"--weight {word}: give each source once, with a number, as --weight ocr=0.3 "
                "--weight charts=2."
            )
        weights[source] = weight
    return weights


def mixture_fields(mixture: MixtureTree) -> dict[str, Any]:
    """The same as data, with whole fingerprints; shares are in percent of an epoch."""
    return {
        "epochs": mixture.epochs,
        "epoch_samples": mixture.epoch.samples,
        "epoch_tokens": mixture.epoch.tokens,
        "sources": [
            {
                "source": each.source,
                "fingerprint": each.fingerprint,
                "samples": each.samples,
                "tokens": each.tokens,
                "weight": each.weight,
                "passes": each.passes,
                "max_passes": each.max_passes,
                "epoch_samples": each.epoch.samples,
                "epoch_tokens": each.epoch.tokens,
                "sample_percent": 100 * mixture.sample_share(each),
                "token_percent": 100 * mixture.token_share(each),
                "times_seen": mixture.times_seen(each),
            }
            for each in mixture.sources
        ],
        "changes": [asdict(change) for change in mixture.changes],
    }


def _mean(count: float) -> str:
    """A number of an epoch, which is a mean over epochs."""
    return f"{count:,.1f}".removesuffix(".0")
