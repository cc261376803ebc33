"""A bucket that asks for a key: the profile's opens it, the service's own does not."""

import json
import os
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import boto3
import pytest
import yaml

from dataservice.core.errors import SourceError
from dataservice.core.job import SourceSpec
from dataservice.core.storage_profile import StorageProfile
from dataservice.jobs.storage_profiles import opened_sources
from dataservice.sources.formats.registry import list_files, open_format
from tests.service.object_store import object_store

pytestmark = pytest.mark.long

BUCKET = "lake"
TEXTS = [f"text {number}" for number in range(3)]


@dataclass(frozen=True)
class Lake:
    """The bucket, and the file with the key that opens it."""

    endpoint: str
    options_file: Path

    def profiles(self) -> dict[str, StorageProfile]:
        lake = StorageProfile(
            roots=(f"s3://{BUCKET}/open",),
            options={"endpoint_url": self.endpoint},
            options_file=str(self.options_file),
        )
        return {"lake": lake}


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lake]:
    home = tmp_path_factory.mktemp("lake")
    (home / "bucket" / "open").mkdir(parents=True)
    lines = [json.dumps({"id": str(number), "text": text}) for number, text in enumerate(TEXTS)]
    (home / "bucket" / "open" / "texts.jsonl").write_text("\n".join(lines))
    with object_store(home / "bucket", BUCKET, home / "store.log"):
        endpoint = os.environ["AWS_ENDPOINT_URL"]
        key = key_that_may_read()
        path = home / "lake.yaml"
        path.touch(mode=0o600)
        names = {"key": key["AccessKeyId"], "secret": key["SecretAccessKey"]}
        path.write_text(yaml.safe_dump(names))
        ask_for_keys(endpoint)
        yield Lake(endpoint=endpoint, options_file=path)


def key_that_may_read() -> dict[str, str]:
    """The key of a new user of the store."""
    users = boto3.client("iam")
    users.create_user(UserName="service")
    rule = {"Effect": "Allow", "Action": "s3:*", "Resource": "*"}
    policy = json.dumps({"Version": "2012-10-17", "Statement": [rule]})
    users.put_user_policy(UserName="service", PolicyName="reads", PolicyDocument=policy)
    made: dict[str, str] = users.create_access_key(UserName="service")["AccessKey"]
    users.close()
    return made


def ask_for_keys(endpoint: str) -> None:
    """Have the store check the signature of each request from now on."""
    plain = {"Content-Type": "text/plain"}
    asked = urllib.request.Request(f"{endpoint}/moto-api/reset-auth", data=b"0", headers=plain)
    urllib.request.urlopen(asked).close()


def source(**more: str) -> SourceSpec:
    url = f"s3://{BUCKET}/open/*.jsonl"
    return SourceSpec(name="texts", format="jsonl", url=url, **more)  # type: ignore[arg-type]


def test_the_services_own_key_does_not_open_it(lake: Lake) -> None:
    with pytest.raises(SourceError, match="permission denied"):
        list_files(source())


def test_the_profiles_key_opens_it(lake: Lake) -> None:
    (granted,) = opened_sources([source(storage_profile="lake")], lake.profiles())
    (file,) = list_files(granted)
    scanned = open_format(granted).scan(file)
    assert [each.raw.record["text"] for each in scanned] == TEXTS  # type: ignore[union-attr]


def test_a_key_that_is_refused_is_not_quoted(lake: Lake, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.yaml"
    wrong.touch(mode=0o600)
    wrong.write_text(yaml.safe_dump({"key": "somebody", "secret": "hunter2-hunter2"}))
    lying = Lake(endpoint=lake.endpoint, options_file=wrong)
    (granted,) = opened_sources([source(storage_profile="lake")], lying.profiles())
    with pytest.raises(SourceError, match="permission denied") as refused:
        list_files(granted)
    assert "hunter2" not in str(refused.value)
