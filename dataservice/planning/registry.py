"""Algorithms by name: one look-up for every table of them.

A table maps each name to the function that does it, beside the functions. The names are a
`Literal`, so that a name without an algorithm fails the type check; one that arrives at run
time is refused here.
"""

from collections.abc import Mapping
from typing import TypeVar

from dataservice.core.plan_options import require_name

Name = TypeVar("Name", bound=str)
Algorithm = TypeVar("Algorithm")


def algorithm_named(table: Mapping[Name, Algorithm], name: Name, what: str) -> Algorithm:
    """The algorithm of that name. Raises PlanningError with the names of the table."""
    require_name(name, table, what)
    return table[name]
