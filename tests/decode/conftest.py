"""Real media and a real tokenizer, made once for the room's tests."""

from pathlib import Path

import pytest

from dataservice.core.sample import MediaBlob, RawSample
from tests.decode.files import Files, Kitchen


@pytest.fixture(scope="session")
def files() -> type[Files]:
    return Files


@pytest.fixture(scope="session")
def make_kitchen() -> type[Kitchen]:
    return Kitchen


@pytest.fixture
def kitchen(tmp_path: Path) -> Kitchen:
    return Kitchen(tmp_path)


@pytest.fixture
def sample():
    """Make a raw sample of a record and blobs."""

    def make(record: dict[str, object], *media: MediaBlob) -> RawSample:
        return RawSample(key="000007", record=record, media=media)

    return make
