"""A job's mixture in figures, from what its index holds."""

from collections.abc import Sequence
from fractions import Fraction

from dataservice.core.errors import SpecError
from dataservice.core.mixture_tree import MixtureSource, MixtureTree
from dataservice.jobs.job_file import JobSpec
from dataservice.sources.index import IndexSummary
from dataservice.sources.mixture import passes_of
from dataservice.sources.totals import SourceTotals, read_totals


def mixture_tree(spec: JobSpec, totals: Sequence[SourceTotals]) -> MixtureTree:
    """The mixture of a job whose sources, in the order of its file, hold this; as it begins."""
    weights = [Fraction(repr(source.weight)) for source in spec.sources]
    tokens = share_tokens(spec, totals)
    passes = weights if tokens is None else passes_of(weights, tokens)
    return MixtureTree(
        epochs=spec.epochs,
        changes=spec.mixture_changes,
        sources=tuple(
            MixtureSource(
                source=source.name,
                fingerprint=held.fingerprint,
                samples=held.samples,
                tokens=held.tokens,
                weight=source.weight,
                passes=float(each),
                max_passes=source.max_passes,
            )
            for source, held, each in zip(spec.sources, totals, passes, strict=True)
        ),
    )


def share_tokens(spec: JobSpec, totals: Sequence[SourceTotals]) -> list[int] | None:
    """The tokens of each source, where the job's weights are shares of tokens. Raises SpecError
    where a source with a share has none."""
    if spec.weights == "passes":
        return None
    for source, held in zip(spec.sources, totals, strict=True):
        if not held.tokens:
            raise SpecError(
                f"source {source.name!r} has no tokens and can give no share of them. Leave it "
                "out, or count weights in passes."
            )
    return [held.tokens for held in totals]


def mixture_as_indexed(spec: JobSpec) -> MixtureTree:
    """The mixture of a job by its index as it was written; the sources are not looked at. Raises
    IndexStaleError where a source has no complete index."""
    return mixture_tree(spec, read_totals(spec.sources, spec.index))


def mixture_of_summaries(spec: JobSpec, summaries: Sequence[IndexSummary]) -> MixtureTree:
    """The mixture of a job whose sources were all indexed just now, with others of its file."""
    totals = {
        made.source: SourceTotals(
            fingerprint=made.fingerprint, samples=made.rows, tokens=made.tokens.total
        )
        for made in summaries
    }
    return mixture_tree(spec, [totals[source.name] for source in spec.sources])
