"""Every row of every paper: `python -m benchmarks.planning --only papers`.

Each paper has a file, with what it prints, what is assumed once for all of its rows, and which
tables are left out and why. Optimus's speed-ups stand with its bubbles, in `layout_bubbles`.

A row's figure is how far the recomputed ratio is from the printed one. `ours` is the same
baseline over this project's planners. A row beyond 15 % says why, with what would meet the paper.
"""

from benchmarks.harness import Row, Scale
from benchmarks.planning.papers.dhp_tables import dhp
from benchmarks.planning.papers.mmscale_figures import mmscale
from benchmarks.planning.papers.omnibal_tables import omnibal_tables
from benchmarks.planning.papers.orchmllm_figures import orchmllm


def papers(scale: Scale) -> list[Row]:
    """Every rebuilt row of every paper."""
    return [*omnibal_tables(scale), *mmscale(scale), *orchmllm(scale), *dhp(scale)]
