"""What `index` prints fits the terminal that it prints on, and leaves nothing out for that."""

from dataclasses import replace
from io import StringIO

import pytest

from dataservice.cli.show_index import index_table, left_out, taken_up, unlearnt
from dataservice.cli.terminal import Terminal
from dataservice.sources.index import IndexSummary, TokenFigures
from dataservice.sources.manifest import MediaCounts, SkippedSample
from dataservice.sources.reasons import NAMED_REASONS, by_wording

COUNTS = {
    "samples": "12,345,678",
    "left out": "3",
    "images": "22,345,678",
    "clips": "6,172,839",
    "recordings": "7",
    "tokens": "11,111,110,200",
    "p50": "801",
    "p99": "7,002",
    "longest": "30,003",
    "files": "20",
    "kept": "13",
    "s": "12.3",
}
LONG = "an-internal-copy-of-laion-2b-en-aesthetic-filtered-by-resolution-and-language-2024-06-01"


def summary(source, reasons=("it is bad.",) * 3):
    skipped = tuple(
        SkippedSample(file="a.tar", key=f"key-{number}", reason=reason)
        for number, reason in enumerate(reasons)
    )
    return IndexSummary(
        source=source,
        rows=12_345_678,
        files=20,
        files_reused=13,
        media=MediaCounts(images=22_345_678, clips=6_172_839, recordings=7),
        tokens=TokenFigures(
            total=11_111_110_200, p50=801, p99=7_002, longest=30_003, learnt=5, unlearnt=0
        ),
        skipped=skipped,
        skipped_reasons=by_wording((each.key, each.reason) for each in skipped),
        left_out=(),
        fingerprint="",
        seconds=12.3,
    )


def shown(width, *summaries):
    out = StringIO()
    Terminal(file=out, width=width).print(index_table(summaries))
    return out.getvalue().splitlines()


def rows(lines):
    """The first line of each table's row of a source, by the titles above it."""
    found, titles = {}, []
    for number, line in enumerate(lines):
        if line.startswith(" source "):
            titles = line.replace("left out", "left_out").split()[1:]
            values = lines[number + 2].split()[1:]
            found.update(zip((name.replace("_", " ") for name in titles), values, strict=True))
    return found


@pytest.mark.parametrize("width", [40, 60, 80, 100, 200])
@pytest.mark.parametrize("name", ["ocr", LONG], ids=["short", "long"])
def test_every_count_is_whole_at_any_width(width, name):
    lines = shown(width, summary(name), summary("captions"))
    assert rows(lines) == COUNTS
    assert max(map(len, lines)) <= width
    assert "…" not in "".join(lines)


@pytest.mark.parametrize("width", [80, 200])
def test_no_character_of_a_source_s_name_is_lost(width):
    tables = "\n".join(shown(width, summary(LONG), summary("ocr"))).split("source ")[1:]
    for table in tables:
        cells = [line.split()[0] for line in table.splitlines()[2:] if line[1:2].strip()]
        assert "".join(cells) == f"{LONG}ocr"


def test_what_an_earlier_run_had_made_of_large_files_is_told():
    made = [summary("ocr"), replace(summary("text"), pieces_reused=1_312)]
    assert [str(line) for line in taken_up(made)] == ["text: pieces kept of large files: 1,312"]


def test_what_was_left_out_has_a_line_a_reason():
    reasons = [
        "clip has 3 frames.",
        "clip has 5 frames.",
        *(f"reason {'x' * n}." for n in range(12)),
    ]
    told = [str(line) for line in left_out([summary("ocr", reasons)], "index")]
    assert told[0] == "ocr: left out 2 × clip has … frames. First: ocr/key-0"
    assert len(told) == NAMED_REASONS + 2
    assert told[-2] == "ocr: left out 3 × for 3 more reasons"
    assert "listed in index/ocr/left_out.jsonl" in told[-1]


def test_samples_of_which_nothing_is_learnt_are_told():
    plain = summary("chat")
    some, every = (
        replace(plain, tokens=replace(plain.tokens, unlearnt=count)) for count in (1234, plain.rows)
    )
    assert not list(unlearnt([plain]))
    first, second = (str(line) for line in unlearnt([some, every]))
    assert first.startswith("chat: of 1,234 of 12,345,678 samples no token is learnt")
    assert second.startswith("chat: of all 12,345,678 samples no token is learnt")
