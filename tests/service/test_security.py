"""Two teams at one service: tokens, TLS, roots and the audit log, as an operator sets them up."""

import contextlib
import hmac
import json
import os
import socket
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme
import yaml
from dataservice_proto.columns import VERSION
from dataservice_proto.v1 import (
    coordinator_pb2,
    coordinator_pb2_grpc,
    worker_pb2,
    worker_pb2_grpc,
)

from dataservice.core.errors import NotFoundError, QuotaError, RoleError, SpecError, TokenError
from dataservice.core.tls import ClientTls
from dataservice.engine.api import JobStatus
from dataservice.operate.tokens_file import make_token
from dataservice.serving.client_access import Access
from dataservice.serving.coordinator_client import CoordinatorClient
from tests.service.support import (
    Ranks,
    ServiceProcess,
    dataservice,
    job_file,
    metrics_addresses,
    scraped,
    serving,
    wait_for,
)
from trainer_client import AccessDenied, ServiceUnreachable, Tls, UnknownJob
from trainer_client.transport import GrpcTransport

RANKS = 3
HANDED_OVER = 6  # more steps than are received ahead lie between it and the new token
WHO = {
    "vision": ("vision", "team"),
    "vision-next": ("vision", "team"),
    "audio": ("audio", "team"),
    "eyes": ("vision", "reader"),
    "operator": (None, "admin"),
}


@dataclass
class Teams:
    """A secured service, and what its teams hold."""

    service: ServiceProcess
    home: Path
    authority: trustme.CA
    tls: Tls
    tokens: dict[str, str] = field(default_factory=dict)
    entries: dict[str, Any] = field(default_factory=dict)

    def client(self, who: str) -> CoordinatorClient:
        """What the command line asks, as somebody."""
        tls = ClientTls(ca_file=str(self.tls.ca_file))
        access = Access(token=lambda: self.tokens[who], tls=tls)
        return CoordinatorClient(self.service.address, access=access)

    def submit(self, who: str, path: Path) -> JobStatus:
        with self.client(who) as client:
            return client.submit(path.read_text(), str(path.parent))

    def ranks(self, who: str, **about: Any) -> Ranks:
        given = {"token": self.tokens[who], "tls": self.tls, **about}
        return Ranks(self.service.address, RANKS, **given)

    def renew(self, *names: str) -> None:
        """Give tokens out and replace the tokens file."""
        for name in names:
            team, role = WHO[name]
            self.tokens[name], record = make_token(team=team, role=role, name=name)
            self.entries[name] = record.model_dump(mode="json", exclude_none=True)
        fresh = self.home / "tokens.new"
        fresh.write_text(yaml.safe_dump(list(self.entries.values())))
        os.replace(fresh, self.home / "tokens.yaml")


def issue(authority: trustme.CA, home: Path) -> dict[str, str]:
    issued = authority.issue_cert("data.test", "127.0.0.1")
    certificate, key = home / "tls.pem", home / "tls.key"
    certificate.write_bytes(b"".join(pem.bytes() for pem in issued.cert_chain_pems))
    issued.private_key_pem.write_to_path(key)
    return {"certificate_file": str(certificate), "key_file": str(key)}


@pytest.fixture(scope="module")
def teams(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Teams]:
    home = tmp_path_factory.mktemp("secured")
    authority = trustme.CA()
    authority.cert_pem.write_to_path(home / "ca.pem")
    made = Teams(
        service=ServiceProcess(home=home),
        home=home,
        authority=authority,
        tls=Tls(ca_file=home / "ca.pem"),
    )
    made.renew(*(name for name in WHO if name != "vision-next"))
    config = {
        "tokens_file": str(home / "tokens.yaml"),
        "tls": {**issue(authority, home), "ca_file": str(home / "ca.pem")},
        "teams": {"vision": {"weight": 2.0}, "audio": {"max_jobs": 1, "max_decode_cpus": 1}},
        "allowed_roots": [str(corpus), str(home / "{team}")],
        "audit_log": str(home / "audit.log"),
        "slots_per_worker": 1,
        "worker_metrics_ports": "24100-24199",  # of this test alone
    }
    (home / "config.yaml").write_text(yaml.safe_dump(config))
    with serving(home, "local", "--config", str(home / "config.yaml")) as service:
        made.service = service
        yield made


def knows(client: CoordinatorClient) -> bool:
    try:
        client.jobs()
    except TokenError:
        return False
    return True


def audited(teams: Teams) -> list[dict[str, str]]:
    return [json.loads(line) for line in (teams.home / "audit.log").read_text().splitlines()]


def test_whoever_speaks_no_tls_writes_no_lines_into_the_log(teams: Teams) -> None:
    host, _, port = teams.service.address.rpartition(":")
    before = teams.service.log.read_text()
    for _ in range(10):
        with socket.create_connection((host, int(port))) as stranger:
            stranger.sendall(b"GET / HTTP/1.0\r\n\r\n")
            with contextlib.suppress(ConnectionResetError):
                while stranger.recv(1024):
                    pass
    written = teams.service.log.read_text().removeprefix(before).splitlines()
    assert [line for line in written if not line.startswith("20")] == []  # ours begin with a date


def test_two_teams_train_jobs_of_one_name_side_by_side_over_tls(teams: Teams, corpus: Path) -> None:
    for team in ("vision", "audio"):
        status = teams.submit(team, job_file(corpus, teams.home / team, epochs=1))
        assert status.record.name == "job"
    running = [teams.ranks(team).start() for team in ("vision", "audio")]
    visits = [ranks.join().visits for ranks in running]
    assert visits == [dict.fromkeys(range(status.samples), 1)] * 2
    assert {shard.job for shards in running[0].shards.values() for shard in shards} == {"job"}
    with teams.client("operator") as client:
        assert [job.record.name for job in client.jobs()] == ["audio/job", "vision/job"]

    def sessions(outcome: str) -> Counter[tuple[str, str]]:
        found = [line for line in audited(teams) if line["outcome"] == outcome]
        return Counter((line["token"], line["job"]) for line in found)

    each = {("vision", "vision/job"): RANKS, ("audio", "audio/job"): RANKS}
    assert sessions("opened") == each
    wait_for(lambda: sessions("closed") == each)


def test_the_command_line_takes_token_and_authority_from_the_environment(
    teams: Teams, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATASERVICE_ADDRESS", teams.service.address)
    monkeypatch.setenv("DATASERVICE_CA_FILE", str(teams.tls.ca_file))
    monkeypatch.setenv("DATASERVICE_TOKEN", teams.tokens["vision"])
    (job,) = json.loads(dataservice("job", "list", "--json").stdout)
    assert job["job"] == "job"


def test_what_is_refused_says_why_and_is_in_the_audit_log_without_a_token(
    teams: Teams, corpus: Path
) -> None:
    with pytest.raises(QuotaError, match="has 1 jobs, and may have 1"):
        teams.submit("audio", job_file(corpus, teams.home / "audio", job="second"))
    for changes in ({"index": "/etc"}, {"index": str(teams.home / "audio" / "index")}):
        path = job_file(corpus, teams.home / "vision", job="other", **changes)
        with pytest.raises(SpecError, match="which this service does not read"):
            teams.submit("vision", path)
    with (
        teams.client("audio") as client,
        pytest.raises(NotFoundError, match=r"no job .vision/job.; registered: job\."),
    ):
        client.explain("vision/job", 0)
    with teams.client("eyes") as client:
        assert client.job("job").record.name == "job"
        with pytest.raises(RoleError, match="has role reader, and DrainJob needs role team"):
            client.drain("job")
    assert {(line["token"], line["outcome"]) for line in audited(teams)} >= {
        ("audio", "QuotaError"),
        ("vision", "SpecError"),
        ("audio", "NotFoundError"),
        ("eyes", "RoleError"),
    }
    told = (teams.home / "audit.log").read_text() + teams.service.log.read_text()
    assert not [token for token in teams.tokens.values() if token in told]


@contextmanager
def rank_zero(teams: Teams, who: str) -> Iterator[tuple[Any, Any]]:
    """A session of rank 0 by hand, beside the other ranks: (its first event, its first shard)."""
    others = teams.ranks(who, elsewhere=[0]).start(stop_after=1)
    transport = GrpcTransport(token=teams.tokens[who], tls=teams.tls)
    with transport.channel(teams.service.address, authorised=True) as channel:
        stub = coordinator_pb2_grpc.CoordinatorStub(channel)
        opened = coordinator_pb2.OpenSessionRequest(
            columns=VERSION, job="job", rank=0, world_size=RANKS
        )
        stream = stub.OpenSession(opened, timeout=60)
        event = next(stream)
        asked = coordinator_pb2.GetShardRequest(session=event.session, step=0, received_step=-1)
        yield event, stub.GetShard(asked, timeout=60).shard
        others.join()
        stream.cancel()


def test_a_stolen_ticket_is_of_no_use_and_who_tries_is_logged_and_counted(teams: Teams) -> None:
    with rank_zero(teams, "vision") as (owner, shard), rank_zero(teams, "audio") as (thief, _):
        ticket, worker, address = shard.ticket, shard.ticket.workers[0], shard.addresses[0]
        assert owner.session not in str(ticket)

        def fetched(proof: bytes) -> int:
            """Who has no token, only the ticket, asks its worker; the bytes of the answer."""
            workers = GrpcTransport(tls=teams.tls)
            with workers.channel(address, authorised=False) as channel:
                request = worker_pb2.FetchRequest(ticket=ticket, proof=proof)
                chunks = worker_pb2_grpc.WorkerStub(channel).Fetch(request, timeout=60)
                return sum(len(chunk.data) for chunk in chunks)

        def proof(key: bytes) -> bytes:
            return hmac.digest(key, ticket.signature + worker.encode(), "sha256")

        for stolen in (b"", proof(thief.ticket_key), proof(owner.session.encode())):
            with pytest.raises(grpc.RpcError, match="given to another session") as refused:
                fetched(stolen)
            assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED
        first, again = fetched(proof(owner.ticket_key)), fetched(proof(owner.ticket_key))
    assert first == again > 0
    log = teams.service.log.read_text()
    assert log.count("a ticket from ipv4:127.0.0.1:") == 3
    assert "is refused: the ticket was given to another session, of rank 0" in log
    assert owner.session not in log
    name = "dataservice_worker_refused_tickets_total"
    refused_of = {
        labels: value
        for address in metrics_addresses(teams.service)
        for (series, labels), value in scraped(address).items()
        if series == name
    }
    by = frozenset({("fault", "holder"), ("worker", worker)})
    assert {labels: value for labels, value in refused_of.items() if value} == {by: 3.0}


def test_trainers_without_a_right_to_the_job_are_refused(teams: Teams) -> None:
    for ranks, error in [
        (teams.ranks("audio", job="vision/job"), UnknownJob),
        (teams.ranks("eyes"), AccessDenied),
        (Ranks(teams.service.address, RANKS, token="dst_wrong", tls=teams.tls), AccessDenied),
        (Ranks(teams.service.address, RANKS, tls=teams.tls), AccessDenied),
    ]:
        ranks.start()
        with pytest.raises(error):
            ranks.join()
    with pytest.raises(ServiceUnreachable, match="The port speaks TLS"):
        Ranks(teams.service.address, RANKS, connect_timeout_s=1.0).start().join()


def test_a_running_job_goes_on_when_its_token_and_the_certificate_are_replaced(
    teams: Teams,
) -> None:
    before = teams.tokens["vision"]
    held = teams.home / "token"
    held.write_text(before)
    running = teams.ranks("vision", token=None, token_file=held, hold_at=1).start()
    wait_for(lambda: running.held)
    teams.renew("vision-next")
    issue(teams.authority, teams.home)
    with teams.client("vision-next") as client:
        wait_for(lambda: knows(client))
    held.write_text(teams.tokens["vision-next"])
    running.release(hold_at=HANDED_OVER)
    wait_for(lambda: running.held)
    with teams.client("vision-next") as client:
        # Each rank makes one call of a kind after the other: the last that had the old token have
        # ended.
        wait_for(lambda: client.job("job").committed_step == HANDED_OVER - 1)
    del teams.entries["vision"]
    teams.renew()
    with teams.client("vision") as client:
        wait_for(lambda: not knows(client))
    running.release()
    assert running.join().steps_done > HANDED_OVER + 3
    stale = teams.ranks("vision", token=before).start()
    with pytest.raises(AccessDenied):
        stale.join()
    assert "tokens taken up" in teams.service.log.read_text()
    assert "certificate taken up" in teams.service.log.read_text()
