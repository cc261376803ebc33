"""Rows as tables on the terminal and as a results file."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.harness import Row, judged, written


def print_rows(console: Console, title: str, rows: Sequence[Row]) -> None:
    """One table: verdict, figure, bar, and what others make of the same work."""
    table = Table(title=title, title_justify="left", show_lines=True)
    for name, ratio in (("what", 5), ("figure", 2), ("bar", 2), ("", 1), ("others", 6)):
        table.add_column(name, ratio=ratio)
    for row in rows:
        others = [row.peer_text(peer) for peer in row.peers]
        if row.paper:
            others.append(f"[italic]{row.paper}[/italic]")
        table.add_row(
            row.what,
            written(row.figure, row.unit),
            row.bar,
            {True: "[green]met[/green]", False: "[bold red]NOT MET[/bold red]", None: ""}[row.met],
            "\n".join(others),
        )
    console.print(table)


def rows_to_markdown(title: str, rows: Sequence[Row]) -> str:
    """The same table, with each row's explanation and group."""
    lines = [
        f"## {title}",
        "",
        "| what | figure | bar | | the same work by others | paper | explanation | group |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        cells = (
            row.what,
            f"**{written(row.figure, row.unit)}**",
            row.bar,
            judged(row.met),
            "; ".join(row.peer_text(peer) for peer in row.peers),
            row.paper,
            row.explanation,
            f"`{row.group}`",
        )
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def verdict(rows: Sequence[Row]) -> str:
    """How many bars are met, and which are not."""
    judged = [row for row in rows if row.met is not None]
    if not judged:
        return "No bars among these rows."
    missed = [row for row in judged if not row.met]
    text = f"{len(judged) - len(missed)} of {len(judged)} bars met."
    for row in missed:
        text += f"\n- NOT MET: {row.what}: {written(row.figure, row.unit)}, bar {row.bar}"
    return text


def write_report(folder: Path, name: str, parts: Sequence[str]) -> Path:
    """Write the parts to `folder/name.md`, making the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.md"
    path.write_text("\n".join(parts), encoding="utf-8")
    return path
