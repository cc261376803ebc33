"""A real server of S3's protocol in a process of its own, reached through a gate that fails as a
network does."""

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import boto3
import fsspec
import pytest

from soak.gate import Gate, through_gate
from tests.waiting import wait_for


@contextmanager
def object_store(home: Path, bucket: str, log: Path) -> Iterator[Gate]:
    """A bucket with every file of `home` by its path there, and the network to it. What runs
    within the block finds it by its environment."""
    with (
        pytest.MonkeyPatch.context() as environment,
        Gate() as network,
        _server(log) as address,
    ):
        endpoint = f"http://{through_gate(network.control, address)}"
        for name, value in (
            ("AWS_ACCESS_KEY_ID", "a-key"),
            ("AWS_SECRET_ACCESS_KEY", "its-secret"),
            ("AWS_DEFAULT_REGION", "us-east-1"),
            ("AWS_ENDPOINT_URL", endpoint),
        ):
            environment.setenv(name, value)
        client = boto3.client("s3")
        client.create_bucket(Bucket=bucket)
        for file in filter(Path.is_file, home.rglob("*")):
            client.upload_file(str(file), bucket, str(file.relative_to(home)))
        client.close()
        # A filesystem that fsspec keeps knows the address of the store that was there before.
        fsspec.get_filesystem_class("s3").clear_instance_cache()
        yield network


@contextmanager
def _server(log: Path) -> Iterator[str]:
    """The server's address."""

    def told() -> list[str]:
        return re.findall(r"Running on http://(\S+)", log.read_text())

    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"]
    with (
        log.open("wb") as sink,
        subprocess.Popen(command, stdout=sink, stderr=subprocess.STDOUT) as process,
    ):
        try:
            wait_for(lambda: bool(told()) or process.poll() is not None)
            assert told(), log.read_text()
            yield told()[0]
        finally:
            process.kill()
