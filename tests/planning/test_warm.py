import os
import subprocess
import sys

import pytest

CACHES = """
import {first}
import dataservice.planning.kernels.sort as sort
print(sort.heap_sift_up._cache.cache_path)
"""


def said(*arguments):
    environment = {name: at for name, at in os.environ.items() if name != "NUMBA_CACHE_DIR"}
    command = [sys.executable, *arguments]
    ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
    return ran.stdout


def test_kernels_are_kept_in_one_place_whoever_imports_numba_first():
    late, early = (said("-c", CACHES.format(first=name)) for name in ("dataservice", "numba"))
    assert "kernels-" in late
    assert early == late


@pytest.mark.long
def test_a_process_that_has_warmed_up_compiles_no_kernel_for_any_step_or_layout():
    assert said("-m", "tests.planning.plan_much") == ""
