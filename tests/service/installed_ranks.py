"""All ranks of a job as another environment has them: its Python, its grpc, its protobuf.

    python installed_ranks.py ADDRESS FOLDER --ranks 3 [--ca-file F --token-file F]

Trains two steps, saves, and resumes to the end; FOLDER/journal has what each rank was given.
Prints one line of JSON: the versions, and where trainer_client was imported from. Needs nothing
but the client and soak/'s journal, so that it runs wherever the client does.
"""

import argparse
import json
import platform
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import google.protobuf
import grpc
import numpy
import torch

import trainer_client
from soak.journal import JournalWriter
from soak.rank import row_of
from trainer_client import ShardDataset, Tls

SAVED_AFTER = 2


def main() -> None:
    """Both launches of every rank, each rank in a thread."""
    parser = argparse.ArgumentParser()
    parser.add_argument("address")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--ca-file", type=Path)
    parser.add_argument("--token-file", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    with ThreadPoolExecutor(given.ranks) as threads:
        states = list(threads.map(lambda rank: first_launch(given, rank), range(given.ranks)))
        assert all(state == states[0] for state in states), "ranks saved different positions"
        state = json.loads(json.dumps(states[0]))  # as a checkpoint keeps it
        list(threads.map(lambda rank: second_launch(given, rank, state), range(given.ranks)))
    versions = {module.__name__: module.__version__ for module in (grpc, numpy, torch)}
    versions["protobuf"] = google.protobuf.__version__
    versions["python"], versions["machine"] = platform.python_version(), platform.machine()
    print(json.dumps({**versions, "client": trainer_client.__file__}))


def opened(given: argparse.Namespace, rank: int) -> ShardDataset:
    """The dataset of one rank."""
    return ShardDataset(
        given.address,
        job="job",
        rank=rank,
        world_size=given.ranks,
        tls=Tls(ca_file=given.ca_file) if given.ca_file else None,
        token_file=given.token_file,
        connect_timeout_s=60.0,
        timeout_s=60.0,
    )


def first_launch(given: argparse.Namespace, rank: int) -> "dict[str, str | int]":
    """Train the first steps; what the rank would save."""
    journal = JournalWriter(given.folder / "journal", launch=0, rank=rank)
    with opened(given, rank) as dataset:
        for shard in dataset:
            journal.write(row_of(shard, launch=0, world_size=given.ranks))
            dataset.commit(shard.step, measured_s=0.1, phase_s={"llm": 0.05})
            if shard.step + 1 == SAVED_AFTER:
                break
        return dataset.state_dict()


def second_launch(given: argparse.Namespace, rank: int, state: "dict[str, str | int]") -> None:
    """Train from the saved position to the end of the data."""
    journal = JournalWriter(given.folder / "journal", launch=1, rank=rank)
    with opened(given, rank) as dataset:
        dataset.load_state_dict(state)
        for shard in dataset:
            journal.write(row_of(shard, launch=1, world_size=given.ranks))
            dataset.commit(shard.step)


if __name__ == "__main__":
    main()
