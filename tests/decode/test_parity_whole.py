"""transformers' processors, called whole; see whole_processors.py.

What transformers finds when it is imported decides which processors it has, so they run in a
process of their own.
"""

import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.long
def test_processors_that_are_called_give_the_same_tokens_and_shapes():
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-n", "0", "-m", "", "-p",
         "tests.decode.torchvision_standin", str(HERE / "whole_processors.py")],
        cwd=HERE.parents[1],
        capture_output=True,
        text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert "7 passed" in done.stdout
