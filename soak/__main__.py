"""`python -m soak`: kill processes at random for ten to fifteen minutes and audit all samples."""

import argparse
import secrets
import shutil
import sys
import tempfile
from pathlib import Path

from rich.console import Console

from soak.report import markdown, summary, tables
from soak.run import SoakOptions, soak

SHOWN = 20  # broken promises that are printed


def main() -> int:
    """Exits 1 when a promise was broken, and keeps the files then."""
    parser = argparse.ArgumentParser(prog="python -m soak", description=__doc__)
    usual = SoakOptions()
    parser.add_argument("--kills", type=int, default=usual.kills, help="SIGKILLs to send")
    parser.add_argument("--limit-s", type=float, default=usual.limit_s, help="fail when it passes")
    parser.add_argument("--seed", type=int, default=None, help="of the faults; random by default")
    parser.add_argument("--nodes", type=int, default=usual.nodes, help="of a Ray cluster to join")
    parser.add_argument("--home", type=Path, default=None, help="folder for its files; kept")
    parser.add_argument("--out", type=Path, default=None, help="folder for the page of results")
    given = parser.parse_args()
    if given.out is not None:
        given.out.mkdir(parents=True, exist_ok=True)
    console = Console(highlight=False)
    seed = secrets.randbelow(10**6) if given.seed is None else given.seed
    home = given.home or Path(tempfile.mkdtemp(prefix="soak-")) / "run"
    options = SoakOptions(kills=given.kills, limit_s=given.limit_s, seed=seed, nodes=given.nodes)
    result = soak(home, options, console.print)
    for table in tables(result):
        console.print(table)
    console.print(summary(result))
    for line in result.broken[:SHOWN]:
        console.print(f"[bold red]broken:[/] {line}", markup=True)
    if given.out is not None:
        page = given.out / f"soak_{given.kills}_kills.md"
        numbers = {name: getattr(options, name) for name in ("kills", "limit_s", "seed", "nodes")}
        flags = (f"--{name.replace('_', '-')} {value}" for name, value in numbers.items())
        page.write_text(markdown(result, f"python -m soak {' '.join(flags)}"))
        console.print(f"written to {page}")
    if result.broken:
        console.print(f"its files are in {home}")
        return 1
    if given.home is None:
        shutil.rmtree(home.parent)
    console.print("[bold green]nothing lost, nothing twice, nothing left behind[/]")
    return 0


if __name__ == "__main__":
    sys.exit(main())
