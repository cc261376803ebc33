"""Python's search for cycles of objects, in processes that make many objects and few cycles."""

import gc


def search_seldom() -> None:
    """Have what exists now never be searched, and the rest seldom: a step may have a million
    objects, none of them in a cycle. At Python's default thresholds the search takes twice the time
    of making them; in a worker it was a tenth of all that its threads did."""
    gc.freeze()
    gc.set_threshold(100_000, 50, 50)
