"""A team whose job files hold endless and enormous programs harms itself alone."""

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from dataservice.core.errors import ServiceError
from dataservice.operate.tokens_file import make_token
from dataservice.serving.client_access import Access
from dataservice.serving.coordinator_client import CoordinatorClient
from tests.service.small import LARGE, LOOPS, SAMPLES, indexed_job, make_corpus, write_job
from tests.service.support import Ranks, ServiceProcess, serving

# What opens jobs has the lowest priority: beside other tests its seconds of CPU may take minutes.
pytestmark = [pytest.mark.timeout(900), pytest.mark.long]

HONEST, HOSTILE = "honest", "hostile"
SUBMISSIONS = 12
ANSWER_LIMIT_S = 300.0
LONGEST_LINE = 64 * 1024


@dataclass
class Teams:
    """A service with two teams, each with a corpus of its own."""

    service: ServiceProcess
    homes: dict[str, Path]
    tokens: dict[str, str]

    def client(self, team: str) -> CoordinatorClient:
        token = self.tokens[team]
        access = Access(token=lambda: token)
        return CoordinatorClient(self.service.address, access=access, timeout_s=ANSWER_LIMIT_S)

    def submit(self, team: str, path: Path) -> None:
        with self.client(team) as client:
            client.submit(path.read_text(), str(path.parent))

    def write(self, team: str, job: str, template: str | None = None) -> Path:
        """A job file of the team's, under a chat template of its own if given."""
        home = self.homes[team]
        pipeline: dict[str, Any] = {
            "tokenizer": "tokenizer",
            "vision": {"kind": "qwen2_vl", "video_min_pixels": 3136},
        }
        if template is not None:
            (home / f"{job}.jinja").write_text(template)
            pipeline["chat_template"] = f"{job}.jinja"
        return write_job(home, job=job, pipeline=pipeline)

    def train(self, team: str, **about: Any) -> Ranks:
        return Ranks(self.service.address, 2, token=self.tokens[team], **about)

    @property
    def resident_bytes(self) -> int:
        """Of the coordinator's process."""
        return int(psutil.Process(self.service.pid).memory_info().rss)


@pytest.fixture
def teams(tmp_path: Path) -> Iterator[Teams]:
    homes, entries, tokens = {}, [], {}
    for team in (HONEST, HOSTILE):
        homes[team] = make_corpus(tmp_path / team)
        indexed_job(homes[team])
        tokens[team], record = make_token(team=team, role="team", name=team)
        entries.append(record.model_dump(mode="json", exclude_none=True))
    (tmp_path / "tokens.yaml").write_text(yaml.safe_dump(entries))
    config = {
        "tokens_file": str(tmp_path / "tokens.yaml"),
        "allowed_roots": [str(tmp_path / "{team}")],
        "job_opening": {"pipeline_cpu_s": 1},
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    with serving(tmp_path / "s", "local", "--config", str(tmp_path / "config.yaml")) as service:
        yield Teams(service=service, homes=homes, tokens=tokens)


def refused(teams: Teams, path: Path, reasons: list[str], enough: threading.Event) -> None:
    """Submit a job that is refused, again and again until it is enough."""
    while True:
        try:
            teams.submit(HOSTILE, path)
        except ServiceError as error:
            reasons.append(str(error))
        if enough.is_set():
            return


def test_another_team_trains_and_is_answered_while_hostile_jobs_are_submitted(teams):
    teams.submit(HONEST, teams.write(HONEST, "job"))
    paths = [
        teams.write(HOSTILE, f"wedge-{number}", (LOOPS, LARGE)[number % 2])
        for number in range(SUBMISSIONS)
    ]
    before = teams.resident_bytes
    reasons: list[str] = []
    enough = threading.Event()
    attackers = [
        threading.Thread(target=refused, args=(teams, path, reasons, enough), daemon=True)
        for path in paths
    ]
    for attacker in attackers:
        attacker.start()
    with teams.client(HONEST) as client:
        ranks = teams.train(HONEST).start().join()
        assert client.job("job").committed_step >= 0
        client.health("job")
        assert all(attacker.is_alive() for attacker in attackers), "the attack outlasts the job"
        enough.set()
        teams.submit(HONEST, teams.write(HONEST, "another"))
    assert len(ranks.visits) == SAMPLES
    assert set(ranks.visits.values()) == {1}
    assert teams.resident_bytes < before + 500e6
    for attacker in attackers:
        attacker.join(ANSWER_LIMIT_S)
    assert len(reasons) >= SUBMISSIONS
    lines = teams.service.log.read_bytes().splitlines()
    assert max(map(len, lines)) < LONGEST_LINE
    teams.service.stop()


def test_a_template_made_endless_in_place_keeps_no_restart_waiting(teams):
    for team in (HONEST, HOSTILE):
        teams.submit(team, teams.write(team, "job"))
    ranks = teams.train(HONEST, pace_s=0.2).start()
    teams.train(HOSTILE).start(stop_after=1).join()
    (teams.homes[HOSTILE] / "tokenizer" / "chat_template.jinja").write_text(LOOPS)
    teams.service.kill()
    teams.service.start()
    ranks.join()
    assert set(ranks.visits.values()) == {1}
    with pytest.raises(ServiceError, match="CPU"):
        teams.submit(HOSTILE, teams.write(HOSTILE, "job"))
    teams.service.stop()
