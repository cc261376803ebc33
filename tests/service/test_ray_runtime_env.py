"""Code of the user's own that only Ray's runtime environment brings to the workers."""

import os
import shutil
from pathlib import Path

import pytest
import yaml

from dataservice.jobs.indexing import index_job
from dataservice.jobs.job_file import read_job
from soak.cluster import cluster
from tests.service.small import SAMPLES, make_corpus, write_job
from tests.service.support import Ranks, ServiceProcess
from trainer_client import ClientError

pytestmark = [pytest.mark.xdist_group("ray"), pytest.mark.long]

REPLACED = "was started with other settings: it is replaced"
CODE = """
class Awake:
    def prepare(self, sample):
        if "text" in sample.record:
            sample.record["text"] = sample.record["text"].replace("lazy", "quick")
        return sample
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An indexed corpus, beside the code that its job names."""
    home = make_corpus(tmp_path / "corpus")
    (home / "code").mkdir()
    (home / "code" / "awake.py").write_text(CODE)
    plain = yaml.safe_load(write_job(home).read_text())["pipeline"]
    path = write_job(home, pipeline={**plain, "prepare": [{"name": "awake"}]})
    with monkeypatch.context() as here:
        here.syspath_prepend(home / "code")
        index_job(read_job(path.read_text(), home), custom_processors={"awake": "awake:Awake"})
    return home


def config_of(home: Path, name: str, **more: object) -> str:
    path = home / f"{name}.yaml"
    path.write_text(yaml.safe_dump({"custom_processors": {"awake": "awake:Awake"}, **more}))
    return str(path)


def test_a_module_that_only_the_runtime_environment_has_runs_in_the_decoding_processes(
    home, tmp_path
):
    with cluster(tmp_path / "ray", (2,), {}) as ray:
        path = os.pathsep.join([str(home / "code"), os.environ.get("PYTHONPATH", "")])
        environment = {**ray.environment, "PYTHONPATH": path}  # of the coordinator alone
        service = ServiceProcess(home=tmp_path / "ray", pool="ray", environment=environment)
        flags = ("--ray-address", ray.address, "--workers", "1", "--config")
        try:
            service.flags = (*flags, config_of(home, "without"))
            service.start().cli("job", "submit", str(home / "job.yaml"))
            with pytest.raises(ClientError, match=r"'awake:Awake', which cannot be imported"):
                Ranks(service.address, 2).start().join()
            service.stop()
            carried = shutil.copytree(home / "code", tmp_path / "carried")
            env = {"py_modules": [str(carried / "awake.py")]}
            service.flags = (*flags, config_of(home, "carried", ray_runtime_env=env))
            service.start()
            ranks = Ranks(service.address, 2).start().join()
            assert ranks.visits == dict.fromkeys(range(SAMPLES), 1)
            assert REPLACED in service.log.read_text()
            service.stop()
            service.start()
            assert REPLACED not in service.log.read_text(), "the module is the same: it is kept"
            service.stop()
            (carried / "awake.py").write_text(f"{CODE}\n# changed\n")
            service.start()
            assert REPLACED in service.log.read_text()
        finally:
            service.end()
