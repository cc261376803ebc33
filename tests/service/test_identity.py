"""A checkpoint goes by what the samples are: not by where or when their files were written."""

import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.support import CommandLine
from tests.service.small import make_corpus, write_job
from tests.service.support import Ranks, serving
from trainer_client import ClientError, Shard

pytestmark = pytest.mark.long

STOPPED_AFTER = 2


def delivered(ranks: Ranks) -> dict[tuple[int, int], str]:
    """Digests of all that each rank was given in each step."""
    return {
        (rank, shard.step): _digest(shard) for rank, got in ranks.shards.items() for shard in got
    }


def _digest(shard: Shard) -> str:
    digest = hashlib.sha256(shard.plan.digest.encode())
    for microbatch in shard.microbatches:
        arrays = [microbatch.sample_ids, microbatch.input_ids, microbatch.labels]
        for modality in (microbatch.vision, microbatch.audio):
            arrays += [] if modality is None else list(modality.items)
        for array in arrays:
            digest.update(array.cpu().numpy().tobytes())
    return digest.hexdigest()


def touched(home: Path, cli: CommandLine, job: Path) -> None:
    for path in (home / "corpus").rglob("*"):
        os.utime(path, (1, 1))


def touched_and_indexed_again(home: Path, cli: CommandLine, job: Path) -> None:
    touched(home, cli, job)
    cli.ok("index", job, "--processes", "1")


def replaced_by_a_copy(home: Path, cli: CommandLine, job: Path) -> None:
    """With its index, under another root, with other times."""
    shutil.copytree(home / "corpus", home / "mounted", copy_function=shutil.copyfile)
    shutil.rmtree(home / "corpus")
    (home / "corpus").symlink_to(home / "mounted")


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(touched, marks=pytest.mark.full),
        touched_and_indexed_again,
        pytest.param(replaced_by_a_copy, marks=pytest.mark.full),
    ],
)
def test_the_same_bytes_resume_from_their_checkpoint_bit_for_bit(
    tmp_path: Path, cli: CommandLine, change: Callable[[Path, CommandLine, Path], None]
) -> None:
    corpus = make_corpus(tmp_path / "corpus")
    job = write_job(corpus, job="job", batch={"samples": 6})
    cli.ok("index", job, "--processes", "1")
    with serving(tmp_path / "service") as service:
        cli.service = service.address
        cli.ok("job", "submit", job)
        undisturbed = delivered(Ranks(service.address, 2).start().join())
        first = Ranks(service.address, 2).start(stop_after=STOPPED_AFTER).join()
        change(tmp_path, cli, job)
        second = Ranks(service.address, 2).start(state=first.state).join()
        assert delivered(first) | delivered(second) == undisturbed
        # Opened anew by another coordinator too, which has compared nothing yet.
        service.stop()
        service.start()
        cli.service = service.address
        third = Ranks(service.address, 2).start(state=first.state).join()
        assert delivered(third) == delivered(second)


def test_other_bytes_of_the_same_size_are_refused_and_the_old_ones_resume(
    tmp_path: Path, cli: CommandLine
) -> None:
    corpus = make_corpus(tmp_path / "corpus")
    job = write_job(corpus, job="job", batch={"samples": 6})
    cli.ok("index", job, "--processes", "1")
    texts = corpus / "texts" / "texts.jsonl"
    old = texts.read_bytes()
    with serving(tmp_path / "service") as service:
        cli.service = service.address
        cli.ok("job", "submit", job)
        first = Ranks(service.address, 2).start(stop_after=STOPPED_AFTER).join()
        texts.write_bytes(old.replace(b"e", b"a", 3) if b"e" in old else old[::-1])
        ranks = Ranks(service.address, 2).start(state=first.state)
        with pytest.raises(ClientError, match=r"texts\.jsonl: \d of its \d+ samples differ"):
            ranks.join()
        assert "its checkpoints no longer fit" in str(ranks.errors[0])
        texts.write_bytes(old)  # at another time
        second = Ranks(service.address, 2).start(state=first.state).join()
        assert min(second.digests) == STOPPED_AFTER
