import pytest

from tests.deploy.cluster import DEPLOY, Cluster
from tests.deploy.kustomize import Object, render

OVERLAYS = {
    "dev": DEPLOY / "overlays" / "dev",
    "production": DEPLOY / "overlays" / "production",
    "production-object-store": DEPLOY / "overlays" / "production-object-store",
    "with_all_components": DEPLOY.parent / "tests" / "deploy" / "with_all_components",
}
EXAMPLES = {
    path.parent.name: path.parent for path in sorted(DEPLOY.glob("examples/*/kustomization.yaml"))
}


@pytest.fixture(scope="session")
def rendered() -> dict[str, list[Object]]:
    """The objects of each overlay, rendered once."""
    return {name: render(folder) for name, folder in OVERLAYS.items()}


@pytest.fixture(params=list(OVERLAYS))
def overlay(request: pytest.FixtureRequest, rendered: dict[str, list[Object]]) -> Cluster:
    """Each overlay in turn."""
    return Cluster(rendered[request.param])


@pytest.fixture
def production(rendered: dict[str, list[Object]]) -> Cluster:
    """A copy of the production overlay, to be spoilt at will."""
    return Cluster(rendered["production"])
