"""The client in the environments that trainers bring: old libraries, and the oldest client.

Each trains, saves and resumes in a process of its own, over TLS with a token, against a service
of this release; what its ranks were given is compared with a decode past the service.
"""

import io
import json
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import venv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from sysconfig import get_path
from typing import Any

import pytest
import trustme
import yaml
from google.protobuf.descriptor_pb2 import DescriptorProto, FileDescriptorProto, FileDescriptorSet
from grpc_tools import protoc

from dataservice.operate.tokens_file import make_token
from soak.audit import Dataset, audit_rows
from soak.journal import read_journals
from tests.service.support import ServiceProcess, job_file, serving

ROOT = Path(__file__).resolve().parents[2]
RANKS = 3
LIMIT_S = 170
INSTALLED_WITHIN_S = 300

# What the last change that is labelled WIRE brought into the protos: the first commit that has it
# has the oldest client that this service must still serve.
WIRE_BEGAN_WITH = "bytes wave_ring"
# What a coordinator asks its workers: these are of its own release, or told to be renewed.
OF_ONE_RELEASE = {
    ("Worker", "Prepare"),
    ("Worker", "Release"),
    ("Worker", "Held"),
    ("Worker", "Index"),
}


def oldest_versions() -> dict[str, str]:
    """The floors that an installation of the client allows."""
    lines = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    floors = dict(re.fullmatch(r"(\w+)>=([\d.]+)", line).groups() for line in lines)
    del floors["torch"]  # its old builds bring gigabytes of CUDA
    return floors


ENVIRONMENTS = {
    "the oldest": oldest_versions(),
    "images of 2024": {"grpcio": "1.62.3", "protobuf": "4.24.4", "numpy": "1.26.4"},
    "images of 2025": {"grpcio": "1.67.1", "protobuf": "5.29.6", "numpy": "2.2.6"},
}


@dataclass(frozen=True)
class Secured:
    """A service with a certificate and a tokens file, and a job of one team."""

    address: str
    home: Path
    job: Path

    def train(self, folder: Path, python: Path, path: Path) -> dict[str, Any]:
        """Have an interpreter train the job with the client found in `path`; what it says."""
        script = Path(__file__).with_name("installed_ranks.py")
        arguments = [self.address, folder, "--ranks", RANKS]
        arguments += ["--ca-file", self.home / "ca.pem", "--token-file", self.home / "token"]
        done = subprocess.run(
            [str(each) for each in (python, script, *arguments)],
            env={**os.environ, "PYTHONPATH": str(path)}, cwd=folder,
            capture_output=True, text=True, timeout=LIMIT_S,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def wrong_with(self, folder: Path) -> list[str]:
        """Samples lost or repeated, bytes that differ, ranks that disagree."""
        return audit_rows(read_journals(folder / "journal"), Dataset(self.job))


@pytest.fixture(scope="module")
def secured(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    home = tmp_path_factory.mktemp("secured")
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1")
    authority.cert_pem.write_to_path(home / "ca.pem")
    issued.cert_chain_pems[0].write_to_path(home / "tls.pem")
    issued.private_key_pem.write_to_path(home / "tls.key")
    token, record = make_token(team="vision", role="team", name="vision")
    (home / "token").write_text(token)
    known = record.model_dump(mode="json", exclude_none=True)
    (home / "tokens.yaml").write_text(yaml.safe_dump([known]))
    config = {
        "tokens_file": str(home / "tokens.yaml"),
        "tls": {
            "certificate_file": str(home / "tls.pem"),
            "key_file": str(home / "tls.key"),
            "ca_file": str(home / "ca.pem"),
        },
        "teams": {"vision": {}},
        "allowed_roots": [str(corpus), str(home)],
    }
    (home / "config.yaml").write_text(yaml.safe_dump(config))
    job = job_file(corpus, home, epochs=1)
    with serving(home, "local", "--config", str(home / "config.yaml")) as service:
        submit(service, home, job)
        yield Secured(service.address, home, job)


def submit(service: ServiceProcess, home: Path, job: Path) -> None:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("DATASERVICE_TOKEN_FILE", str(home / "token"))
        environment.setenv("DATASERVICE_CA_FILE", str(home / "ca.pem"))
        service.cli("job", "submit", str(job))


@pytest.fixture(scope="module")
def oldest_client(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its packages, as history has them, with the journal of today's soak."""
    if not (ROOT / ".git").exists() or git("rev-parse", "--is-shallow-repository") == b"true\n":
        pytest.skip("the oldest client is in the history, which this copy has not; git clone has")
    found = git("log", "--reverse", "--format=%H", "-S", WIRE_BEGAN_WITH, "--", "protos")
    assert found, f"no commit brought {WIRE_BEGAN_WITH!r} into the protos"
    home = tmp_path_factory.mktemp("oldest")
    packed = git("archive", found.split()[0].decode(), "trainer_client", "protos")
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        archive.extractall(home, filter="data")
    (home / "dataservice_proto").symlink_to(home / "protos" / "dataservice_proto")
    (home / "soak").symlink_to(ROOT / "soak")
    return home


def git(*arguments: str) -> bytes:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, check=True).stdout


@pytest.mark.long
@pytest.mark.timeout(INSTALLED_WITHIN_S + LIMIT_S)
@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_a_trainer_with_libraries_of_its_own_gets_every_sample(name, secured, tmp_path):
    versions = ENVIRONMENTS[name]
    python = environment(tmp_path / "environment", versions)
    told = secured.train(tmp_path, python, client(tmp_path))
    used = {"grpcio": told["grpc"], "protobuf": told["protobuf"], "numpy": told["numpy"]}
    assert used == versions
    assert secured.wrong_with(tmp_path) == []


@pytest.mark.long
@pytest.mark.timeout(2 * LIMIT_S)
def test_the_oldest_client_of_this_wire_gets_every_sample(secured, oldest_client, tmp_path):
    told = secured.train(tmp_path, Path(sys.executable), oldest_client)
    assert Path(told["client"]).is_relative_to(oldest_client)
    assert secured.wrong_with(tmp_path) == []


def environment(home: Path, versions: dict[str, str]) -> Path:
    """An interpreter with these libraries before all others; torch is that of these tests."""
    venv.create(home, symlinks=True)
    python = home / "bin" / "python"
    pins = [f"{name}=={version}" for name, version in versions.items()]
    subprocess.run(
        [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet",
         "--only-binary=:all:", *pins],
        check=True,
    )  # fmt: skip
    (site,) = home.glob("lib/python3.*/site-packages")
    (site / "torch.pth").write_text(get_path("purelib"))
    return python


def client(home: Path) -> Path:
    """A folder from which the client can be imported, and nothing of the service."""
    folder = home / "client"
    folder.mkdir()
    for name in ("trainer_client", "protos/dataservice_proto", "soak"):
        (folder / Path(name).name).symlink_to(ROOT / name)
    return folder


def test_no_message_lost_or_changed_a_field_since_this_wire_began(oldest_client, tmp_path):
    before, now = wire(oldest_client / "protos", tmp_path), wire(ROOT / "protos", tmp_path)
    known = {"Coordinator.GetShard", "RankShard.columns", "Worker.Fetch", "PartHeader.crc32"}
    assert known <= before.keys()
    assert {name: now.get(name) for name in before} == before


def wire(protos: Path, out: Path) -> dict[str, tuple[object, ...]]:
    """What trainers and the command line rely on: of every method its types, and of every field
    of their messages its number, type and label."""
    described = out / "descriptors"
    sources = [str(path) for path in sorted(protos.rglob("*.proto"))]
    assert protoc.main(["", f"-I{protos}", f"--descriptor_set_out={described}", *sources]) == 0
    files = FileDescriptorSet.FromString(described.read_bytes()).file
    of_type = {name: about for file in files for name, about in _types_of(file)}
    told: dict[str, tuple[object, ...]] = {}
    left = []
    for service in (service for file in files for service in file.service):
        for method in service.method:
            if (service.name, method.name) not in OF_ONE_RELEASE:
                types = method.input_type, method.output_type
                streams = method.client_streaming, method.server_streaming
                told[f"{service.name}.{method.name}"] = (*types, *streams)
                left += types
    while left:
        about = of_type.pop(left.pop(), {})
        told |= about
        left += [str(field[2]) for field in about.values() if len(field) > 1]
    return told


def _types_of(file: FileDescriptorProto) -> Iterator[tuple[str, dict[str, tuple[object, ...]]]]:
    """Each message and enum of a file, by its full name."""
    for message in file.message_type:
        yield f".{file.package}.{message.name}", dict(_of_message(message))
    for enum in file.enum_type:
        values = {f"{enum.name}.{value.name}": (value.number,) for value in enum.value}
        yield f".{file.package}.{enum.name}", values


def _of_message(message: DescriptorProto) -> Iterator[tuple[str, tuple[object, ...]]]:
    for nested in message.nested_type:
        yield from ((f"{message.name}.{name}", about) for name, about in _of_message(nested))
    for field in message.field:
        about = (field.number, field.type, field.type_name, field.label)
        yield f"{message.name}.{field.name}", about
