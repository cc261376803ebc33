import subprocess
import sys

import pytest


@pytest.mark.long
def test_a_process_that_has_warmed_up_compiles_no_kernel_for_any_step_or_layout():
    command = [sys.executable, "-m", "tests.planning.plan_much"]
    ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    assert ran.stdout == ""
