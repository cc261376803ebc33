"""Compile what a checkout runs, as an image's build does: part of the set-up.

Modules are compiled too: under PYTHONDONTWRITEBYTECODE each process would compile those of a
checkout anew, which was a fifth of what a service's start took of the processors.
"""

import compileall
from pathlib import Path
from runpy import run_module

ROOT = Path(__file__).parents[1]
PACKAGES = ("benchmarks", "dataservice", "demo", "protos", "soak", "tests", "trainer_client")

if __name__ == "__main__":
    for package in PACKAGES:
        compileall.compile_dir(ROOT / package, quiet=1)
    run_module("dataservice.warm", run_name="__main__")
