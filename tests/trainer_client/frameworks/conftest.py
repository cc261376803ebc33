import logging

import pytest

from tests.trainer_client.frameworks.loops import STEPS


def pytest_collection_modifyitems(items):
    """The frameworks have warnings of their own; a doubt about the position fails a test."""
    filters = pytest.mark.filterwarnings("ignore", "error::trainer_client.UncommittedSteps")
    for item in items:
        if "frameworks" in item.path.parts:
            item.add_marker(filters)


@pytest.fixture
def service(make_service):
    return make_service(steps=STEPS)


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    for name in ("lightning.pytorch", "transformers"):
        monkeypatch.setattr(logging.getLogger(name), "level", logging.ERROR)
