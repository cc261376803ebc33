from pathlib import Path

import pytest

from tests.jobs.corpus import make_corpus


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A corpus without an index."""
    return make_corpus(tmp_path / "corpus")
