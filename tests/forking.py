"""Processes that are forked where their libraries are loaded: torch's compiler, the wrappers and
transformers alone take two to five seconds in each."""

import multiprocessing
from multiprocessing.context import ForkServerContext


def forking() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    # One server for all tests of a process, whoever starts it.
    context.set_forkserver_preload(["tests.forked_imports"])
    return context
