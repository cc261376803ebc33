"""Damaged archives, tables and indexes: samples or a deliberate error, and never other data
under the name of a sample that was indexed."""

import pytest

from tests.fuzz import bombs, seeds
from tests.fuzz.campaign import FACTOR, LIMITS, SEED, campaign, damaged
from tests.fuzz.lab import run_cases

TAR = ("webdataset", "tar")
PARQUET = ("parquet", "parquet")
JSONL = ("jsonl", "jsonl")


def whole(_number: int, data: bytes) -> bytes:
    return data


def test_a_damaged_tar_gives_samples_that_read_the_same_again_or_an_error() -> None:
    inputs = damaged(seeds.tars(), 1000, "tars")
    campaign("tar", inputs, "tests.fuzz.tasks:source_bytes", whole, (*TAR, LIMITS))


def test_a_damaged_parquet_file_gives_samples_that_read_the_same_again_or_an_error() -> None:
    inputs = damaged(seeds.parquets(), 1000, "parquets")
    campaign("parquet", inputs, "tests.fuzz.tasks:source_bytes", whole, (*PARQUET, LIMITS))


def test_damaged_lines_give_samples_that_read_the_same_again_or_an_error() -> None:
    inputs = damaged((*seeds.good_lines(), seeds.lines()[0]), 500, "lines")
    campaign("jsonl", inputs, "tests.fuzz.tasks:source_bytes", whole, (*JSONL, LIMITS))


@pytest.mark.parametrize(
    ("kind", "intact"),
    [(TAR, seeds.tars()[0]), (PARQUET, seeds.parquets()[0]), (JSONL, seeds.good_lines()[0])],
    ids=["tar", "parquet", "jsonl"],
)
def test_a_sample_that_changed_after_indexing_is_masked(
    kind: tuple[str, str], intact: bytes
) -> None:
    inputs = damaged([intact], 250, f"changed {kind}")
    setting = (*kind, intact)
    campaign(f"changed-{kind[1]}", inputs, "tests.fuzz.tasks:changed", whole, setting)


def test_a_footer_that_ends_arrows_process_does_not_end_ours() -> None:
    """Found by the campaign: a FLOAT column with a size that only texts have."""
    outcomes = run_cases(
        "tests.fuzz.tasks:source_bytes", [bombs.parquet_that_aborts()], setting=(*PARQUET, None)
    )
    assert [outcome.verdict for outcome in outcomes] == ["refused"]


@pytest.mark.parametrize("kind", ["json", "parquet"])
def test_a_damaged_index_opens_soundly_or_is_refused(kind: str) -> None:
    names = [f"{SEED} {kind} {number}".encode() for number in range(int(250 * FACTOR))]
    campaign(
        f"index-{kind}",
        names,
        "tests.fuzz.tasks:index",
        lambda _, name: (kind, name.decode()),
        None,
    )
