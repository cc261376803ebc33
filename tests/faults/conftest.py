import pytest

from soak.corpus import make_data
from tests.faults.disk import small_disk
from tests.faults.stage import staged


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """The soak's corpus, indexed."""
    home = tmp_path_factory.mktemp("data")
    make_data(home)
    return home


@pytest.fixture(scope="module")
def stage(data, tmp_path_factory):
    """A service that has joined a Ray cluster of two nodes beside the head, a worker on each, and
    has a small disk for its state. Shared by the cases: each heals what it has done."""
    home = tmp_path_factory.mktemp("stage")
    with small_disk(home / "state"), staged(data, home, "ray", nodes=2) as made:
        yield made


@pytest.fixture(scope="module")
def local_stage(data, tmp_path_factory):
    """A service whose workers are threads of its own."""
    with staged(data, tmp_path_factory.mktemp("local"), "local") as made:
        yield made
