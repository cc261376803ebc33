"""How many files and sockets this process may have open at once (RLIMIT_NOFILE)."""

import contextlib
import resource

UNLIMITED = resource.RLIM_INFINITY
NEAR_RANKS = 64
"""Ranks on its own machine that a worker serves through memory at once, each with a socket and the
memory that both map."""


def descriptor_limit() -> int:
    """The limit as it is now; `UNLIMITED` is below every number."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def raise_descriptor_limit() -> int:
    """Raise the limit of this process, and of those that it starts, to the hard one, which is the
    operator's; what it is then. Each rank that is connected takes some."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        # Where the hard limit is "none", some systems refuse as much.
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return descriptor_limit()
