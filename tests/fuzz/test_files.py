"""Damaged archives, tables and indexes: samples or a deliberate error, and never other data
under the name of a sample that was indexed. What a wrong sample is: see campaign.py."""

import pytest

from tests.fuzz import seeds
from tests.fuzz.campaign import FACTOR, LIMITS, SEED, Tally, campaign, damaged

TAR = ("webdataset", "tar")
PARQUET = ("parquet", "parquet")
JSONL = ("jsonl", "jsonl")
ARRAY = ("json", "json")
ARROW = ("arrow", "arrow")
MDS = ("mds", "mds")


def whole(_number: int, data: bytes) -> bytes:
    return data


def test_a_damaged_tar_gives_samples_that_read_the_same_again_or_an_error(
    tally: Tally,
) -> None:
    inputs = damaged(seeds.tars(), 1000, "tars")
    campaign(tally, "tar", inputs, "tests.fuzz.tasks:source_bytes", whole, (*TAR, LIMITS))


def test_a_damaged_parquet_file_gives_samples_that_read_the_same_again_or_an_error(
    tally: Tally,
) -> None:
    inputs = damaged(seeds.parquets(), 1000, "parquets")
    campaign(tally, "parquet", inputs, "tests.fuzz.tasks:source_bytes", whole, (*PARQUET, LIMITS))


def test_a_damaged_arrow_file_gives_samples_that_read_the_same_again_or_an_error(
    tally: Tally,
) -> None:
    inputs = damaged(seeds.arrows(), 1000, "arrows")
    campaign(tally, "arrow", inputs, "tests.fuzz.tasks:source_bytes", whole, (*ARROW, LIMITS))


def test_a_damaged_shard_gives_samples_that_read_the_same_again_or_an_error(
    tally: Tally,
) -> None:
    inputs = damaged(seeds.mds_shards(), 1000, "shards")
    campaign(tally, "mds", inputs, "tests.fuzz.tasks:source_bytes", whole, (*MDS, LIMITS))


def test_damaged_lines_give_samples_that_read_the_same_again_or_an_error(
    tally: Tally,
) -> None:
    inputs = damaged((*seeds.good_lines(), seeds.lines()[0]), 500, "lines")
    campaign(tally, "jsonl", inputs, "tests.fuzz.tasks:source_bytes", whole, (*JSONL, LIMITS))


def test_a_damaged_array_gives_samples_that_read_the_same_again_or_an_error(
    tally: Tally,
) -> None:
    inputs = damaged([array(each) for each in seeds.good_lines()], 500, "arrays")
    campaign(tally, "json", inputs, "tests.fuzz.tasks:source_bytes", whole, (*ARRAY, LIMITS))


def array(lines: bytes) -> bytes:
    """The same records as one array."""
    return b"[" + b",\n".join(lines.splitlines()) + b"]"


@pytest.mark.parametrize(
    ("kind", "intact"),
    [
        (TAR, seeds.tars()[0]),
        (TAR, seeds.tar_of_media()),
        (PARQUET, seeds.parquets()[0]),
        (ARROW, seeds.arrows()[0]),
        (MDS, seeds.mds_shards()[0]),
        (JSONL, seeds.good_lines()[0]),
    ],
    ids=["tar", "media", "parquet", "arrow", "mds", "jsonl"],
)
def test_a_sample_that_changed_after_indexing_is_masked_or_what_it_was(
    request: pytest.FixtureRequest, tally: Tally, kind: tuple[str, str], intact: bytes
) -> None:
    name = request.node.callspec.id
    inputs = damaged([intact], 250, f"changed {name}")
    campaign(
        tally,
        f"{name}, once indexed",
        inputs,
        "tests.fuzz.tasks:changed",
        whole,
        (*kind, intact),
        after_indexing=True,
    )


@pytest.mark.parametrize("kind", ["json", "parquet", "bin"])
def test_a_damaged_index_opens_soundly_or_is_refused(tally: Tally, kind: str) -> None:
    names = [f"{SEED} {kind} {number}".encode() for number in range(int(250 * FACTOR))]
    campaign(
        tally,
        f"index, {kind}",
        names,
        "tests.fuzz.tasks:index",
        lambda _, name: (kind, name.decode()),
        None,
        some_pass=kind != "json",  # which is checked to the last letter
    )
