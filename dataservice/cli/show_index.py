"""What `dataservice index` prints: the samples, media and tokens found, and what was left out."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from rich.text import Text

from dataservice.cli.listing import Listing
from dataservice.sources.index_folder import LEFT_OUT
from dataservice.sources.reasons import reason_lines

if TYPE_CHECKING:  # they load the planner and codecs
    from dataservice.jobs.dry_run import DryRun
    from dataservice.sources.index import IndexSummary

NAME_CHARACTERS = 24  # of a source, before the name is folded


def index_table(summaries: Sequence["IndexSummary"]) -> Listing:
    """One row per source: its samples and those left out, its media, its tokens in total and per
    sample, its files and the number indexed before."""
    rows = [_row(each) for each in summaries]
    columns = list(rows[0]) if rows else []
    table = Listing(columns, words=("source",), title="index", least=NAME_CHARACTERS)
    for row in rows:
        table.add_row(*row.values())
    return table


def _row(summary: "IndexSummary") -> dict[str, str]:
    media, tokens = summary.media, summary.tokens
    counts = {
        "samples": summary.rows,
        "left out": len(summary.skipped),
        "images": media.images,
        "clips": media.clips,
        "recordings": media.recordings,
        "tokens": tokens.total,
        "p50": tokens.p50,
        "p99": tokens.p99,
        "longest": tokens.longest,
        "files": summary.files,
        "kept": summary.files_reused,
    }
    shown = {name: f"{count:,}" for name, count in counts.items()}
    return {"source": summary.source, **shown, "s": f"{summary.seconds:.1f}"}


def cut(summaries: Sequence["IndexSummary"]) -> Iterator[Text]:
    """How many documents became how many samples."""
    for summary in summaries:
        if documents := summary.long.documents:
            what = "long documents are" if documents > 1 else "long document is"
            yield Text(
                f"{summary.source}: {documents:,} {what} cut into {summary.long.pieces:,} samples"
            )


def unlearnt(summaries: Sequence["IndexSummary"]) -> Iterator[Text]:
    """Of how many samples nothing is learnt: a step of such samples alone has no loss."""
    for summary in summaries:
        if none := summary.tokens.unlearnt:
            every = none == summary.rows
            yield Text(
                f"{summary.source}: of {'all' if every else f'{none:,} of'} {summary.rows:,} "
                "samples no token is learnt: they have no turn of the assistant, or the template "
                "does not mark it. `dataservice preview` shows what is learnt of one",
                style="yellow",
            )


def taken_up(summaries: Sequence["IndexSummary"]) -> Iterator[Text]:
    """How much an earlier run had made of files that it did not finish."""
    for summary in summaries:
        if summary.pieces_reused:
            yield Text(f"{summary.source}: pieces kept of large files: {summary.pieces_reused:,}")


def left_out(summaries: Sequence["IndexSummary"], index_dir: str | None) -> Iterator[Text]:
    """What is not in the index: damaged files, and samples grouped by the reason's text. Without
    an `index_dir`, of an index that is not kept."""
    for summary in summaries:
        name = summary.source
        for file in summary.left_out:
            yield Text(f"{name}: left out the file {file.name}: {file.reason}", style="yellow")
        reasons = summary.skipped_reasons
        for line in reason_lines(name, reasons):
            yield Text(f"{name}: left out {line}", style="yellow")
        if reasons and index_dir is not None:
            yield Text(
                f"{name}: all are listed in {index_dir}/{name}/{LEFT_OUT}",
                style="yellow",
            )


def index_json(summaries: Sequence["IndexSummary"]) -> str:
    """The same as a list of objects, with every sample and file that was left out."""
    return json.dumps([asdict(summary) for summary in summaries], indent=2)


def dry_run_line(done: "DryRun") -> Text:
    """How much of the files the figures are of."""
    files = sum(summary.files + len(summary.left_out) for summary in done.summaries)
    share = done.read_bytes / done.total_bytes if done.total_bytes else 1.0
    return Text(
        f"dry run: at most the first {done.samples_per_file:,} samples of each of {files:,} files "
        f"were measured, {share:.2%} of their bytes. Nothing was written: run it without --dry-run "
        "to make the index.",
        style="bold",
    )


def dry_run_json(done: "DryRun") -> str:
    """The same as an object, with a summary of each source under `sources`."""
    fields = asdict(done)
    sources = fields.pop("summaries")
    return json.dumps({"dry_run": True, **fields, "sources": sources}, indent=2)
