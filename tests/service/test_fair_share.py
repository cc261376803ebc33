"""Two teams on one slot of a real service: two to one by weight, and idle share is lent."""

import time
from pathlib import Path

import pytest
import yaml

from dataservice.core.tokens import new_token, token_digest
from dataservice.jobs.indexing import index_job
from dataservice.jobs.job_file import read_job
from dataservice.serving.client_access import Access
from dataservice.serving.coordinator_client import CoordinatorClient
from tests.service.slow_vision import IMPORT_PATH, NAME
from tests.service.small import make_corpus, write_job
from tests.service.support import (
    Ranks,
    free_ports,
    metrics_addresses,
    scraped,
    serving,
    wait_for,
)

pytestmark = pytest.mark.long

EPOCHS = 2000
SERVED = "dataservice_worker_team_decode_seconds_total"


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """Images only, and so many steps ahead that a rank which the machine holds up leaves no slot
    to the other team."""
    home = make_corpus(tmp_path / "corpus")
    file = write_job(
        home,
        sources=[{"name": "images", "format": "webdataset", "url": "images/images-*.tar"}],
        pipeline={"tokenizer": "tokenizer", "vision": {"kind": "custom", "name": NAME}},
        epochs=EPOCHS,
        ready_steps=64,
    )
    spec = read_job(file.read_text(), home)
    index_job(spec, custom_processors={NAME: IMPORT_PATH})
    return file


def served_s(worker: str, team: str) -> float:
    """The seconds that the worker's slot has spent for a team."""
    series = scraped(worker)
    return sum(
        seconds
        for (name, labels), seconds in series.items()
        if name == SERVED and ("team", team) in labels
    )


def share_of_a_second(worker: str, team: str) -> float:
    """How much of the next second the slot spends for a team."""
    began_s, before_s = time.monotonic(), served_s(worker, team)
    time.sleep(1.0)
    return (served_s(worker, team) - before_s) / (time.monotonic() - began_s)


def test_a_team_of_twice_the_weight_gets_twice_the_decoding_and_one_alone_gets_all(tmp_path, job):
    tokens = {"large": new_token(), "small": new_token()}
    entries = [
        {"name": team, "team": team, "role": "team", "sha256": token_digest(token).hex()}
        for team, token in tokens.items()
    ]
    (tmp_path / "tokens.yaml").write_text(yaml.safe_dump(entries))
    config, port = tmp_path / "service.yaml", free_ports(4)
    config.write_text(
        yaml.safe_dump(
            {
                "workers": 1,
                "slots_per_worker": 1,
                "worker_metrics_ports": f"{port}-{port + 3}",
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
        (worker,) = metrics_addresses(service)
        small, large = ranks["small"].start(), ranks["large"]
        # Twice its own share, which is a third; in an undisturbed second it is nearly all.
        wait_for(lambda: share_of_a_second(worker, "small") > 2 / 3)
        large.start()
        wait_for(lambda: large.steps_done >= 1)
        before_s = {team: served_s(worker, team) for team in tokens}

        def two_to_one() -> bool:
            """By what the slot spent since: the longer, the less a sample counts that the machine
            held up, and for which the other team is still to get its share."""
            gained_s = {team: served_s(worker, team) - before_s[team] for team in tokens}
            enough = gained_s["small"] >= 2
            return enough and gained_s["large"] / gained_s["small"] == pytest.approx(2, rel=0.1)

        wait_for(two_to_one)
        small.stop_at_one_step()
        large.stop_at_one_step()
