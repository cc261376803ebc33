"""A catalog as the process that plans with it has it."""

import os

from benchmarks.scale.made_job import hand_over
from dataservice.core.limits import DEFAULT_LIMITS
from dataservice.sources.catalog import IndexedCatalog
from dataservice.sources.catalog_handover import (
    RowFiles,
    hand_over_head,
    take_over,
    take_over_head,
)


def handed_over(catalog: IndexedCatalog) -> IndexedCatalog:
    """The catalog on the other side."""
    files, head = hand_over(catalog), take_over_head(hand_over_head(catalog.parts))
    taken = RowFiles(lengths=files.lengths, details=os.dup(files.details))
    return take_over(head, taken, DEFAULT_LIMITS)
