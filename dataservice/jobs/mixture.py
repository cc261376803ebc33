"""A job's mixture in figures, from what its index holds."""

from collections.abc import Sequence

from dataservice.core.mixture_tree import MixtureSource, MixtureTree
from dataservice.jobs.job_file import JobSpec
from dataservice.sources.catalog import SourceTotals, read_totals
from dataservice.sources.index import IndexSummary


def mixture_tree(spec: JobSpec, totals: Sequence[SourceTotals]) -> MixtureTree:
    """The mixture of a job whose sources, in the order of its file, hold this."""
    return MixtureTree(
        epochs=spec.epochs,
        sources=tuple(
            MixtureSource(
                source=source.name,
                fingerprint=held.fingerprint,
                samples=held.samples,
                tokens=held.tokens,
                weight=source.weight,
            )
            for source, held in zip(spec.sources, totals, strict=True)
        ),
    )


def mixture_as_indexed(spec: JobSpec) -> MixtureTree:
    """The mixture of a job by its index as it was written; the sources are not looked at. Raises
    IndexStaleError where a source has no complete index."""
    return mixture_tree(spec, read_totals(spec.sources, spec.index))


def mixture_of_summaries(spec: JobSpec, summaries: Sequence[IndexSummary]) -> MixtureTree:
    """The mixture of a job whose sources were all indexed just now."""
    totals = [
        SourceTotals(fingerprint=made.fingerprint, samples=made.rows, tokens=made.tokens.total)
        for made in summaries
    ]
    return mixture_tree(spec, totals)
