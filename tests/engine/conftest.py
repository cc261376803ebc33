import pytest

from dataservice.state.memory import MemoryStateStore
from tests.engine.support import Books


@pytest.fixture
def books() -> Books:
    return Books()


@pytest.fixture
def store() -> MemoryStateStore:
    return MemoryStateStore()
