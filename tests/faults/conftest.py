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
def ray_stage(data, tmp_path_factory):
    """A service with Ray workers, shared by the cases: each heals what it has done."""
    with staged(data, tmp_path_factory.mktemp("ray"), "ray") as made:
        yield made


@pytest.fixture(scope="module")
def local_stage(data, tmp_path_factory):
    """A service whose workers are threads of its own: it is back within seconds."""
    with staged(data, tmp_path_factory.mktemp("local"), "local") as made:
        yield made


@pytest.fixture(scope="module")
def disk_stage(data, tmp_path_factory):
    """A service whose state directory has a small disk of its own."""
    home = tmp_path_factory.mktemp("disk")
    with small_disk(home / "state"), staged(data, home, "local") as made:
        yield made


@pytest.fixture(scope="module")
def node_stage(data, tmp_path_factory):
    """A service that has joined a Ray cluster of two nodes beside the head, a worker on each."""
    with staged(data, tmp_path_factory.mktemp("nodes"), "ray", nodes=2) as made:
        yield made
