"""Two teams on one slot of a real service: two to one by weight, and idle share is lent."""

import time
from pathlib import Path

import pytest
import yaml

from dataservice.core.tokens import new_token, token_digest
from dataservice.jobs.job_file import read_job
from dataservice.jobs.setup import index_job
from dataservice.serving.client_access import Access
from dataservice.serving.coordinator_client import CoordinatorClient
from tests.service.slow_vision import IMPORT_PATH, NAME
from tests.service.small import make_corpus, write_job
from tests.service.support import Ranks, serving, wait_for

pytestmark = pytest.mark.long

EPOCHS = 200


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """Images only: each takes the same time, so that steps count seconds."""
    home = make_corpus(tmp_path / "corpus")
    file = write_job(
        home,
        sources=[{"name": "images", "format": "webdataset", "url": "images/images-*.tar"}],
        pipeline={"tokenizer": "tokenizer", "vision": {"kind": "custom", "name": NAME}},
        epochs=EPOCHS,
        ready_steps=6,
    )
    spec = read_job(file.read_text(), home)
    index_job(spec, custom_processors={NAME: IMPORT_PATH})
    return file


def steps_a_second(ranks: Ranks, steps: int) -> float:
    """Over so many steps from the next one on, behind a few that were decoded ahead."""
    begin = ranks.steps_done + 8
    wait_for(lambda: ranks.steps_done >= begin)
    begun_s = time.monotonic()
    wait_for(lambda: ranks.steps_done >= begin + steps)
    return steps / (time.monotonic() - begun_s)


def test_a_team_of_twice_the_weight_gets_twice_the_decoding_and_one_alone_gets_all(tmp_path, job):
    tokens = {"large": new_token(), "small": new_token()}
    entries = [
        {"name": team, "team": team, "role": "team", "sha256": token_digest(token).hex()}
        for team, token in tokens.items()
    ]
    (tmp_path / "tokens.yaml").write_text(yaml.safe_dump(entries))
    config = tmp_path / "service.yaml"
    config.write_text(
        yaml.safe_dump(
            {
                "workers": 1,
                "slots_per_worker": 1,
                "custom_processors": {NAME: IMPORT_PATH},
                "tokens_file": str(tmp_path / "tokens.yaml"),
                "allowed_roots": "any",
                "teams": {"large": {"weight": 2}, "small": {"weight": 1}},
            }
        )
    )
    with serving(tmp_path / "service", "local", "--config", str(config)) as service:
        ranks = {}
        for team, token in tokens.items():
            client = CoordinatorClient(service.address, access=Access(token=lambda t=token: t))
            client.submit(job.read_text(), str(job.parent))
            client.close()
            ranks[team] = Ranks(service.address, 1, token=token)
        small, large = ranks["small"].start(), ranks["large"]
        alone = steps_a_second(small, 16)
        large.start()
        # A rank that the machine holds up trains later what was decoded ahead: at most six steps,
        # which must be few beside those that are counted.
        wait_for(lambda: large.steps_done >= 12)
        before = small.steps_done, large.steps_done
        shared = steps_a_second(small, 60)
        gained = small.steps_done - before[0], large.steps_done - before[1]
        for each in (small, large):
            each.stopping = True
        small.join()
        large.join()
    assert gained[1] / gained[0] == pytest.approx(2, rel=0.1)
    assert alone / shared > 2, "alone it had the share of the other too, three times its own"
