"""Token ids that are trained are those of the tokenizer that the job was opened with."""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from dataservice.jobs.indexing import index_job
from dataservice.jobs.job_file import read_job
from soak.processes import decoders
from tests.service.small import SAMPLES, make_corpus, write_job
from tests.service.support import Ranks, ServiceProcess, serving, wait_for
from trainer_client import ClientError

pytestmark = pytest.mark.long


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return indexed(make_corpus(tmp_path / "corpus"))


@pytest.fixture
def service(tmp_path: Path) -> Iterator[ServiceProcess]:
    with serving(tmp_path / "service") as running:
        yield running


def indexed(home: Path) -> Path:
    index_job(
        read_job(write_job(home, plan={"memory_tokens": 1024}).read_text(), home),
        custom_processors={},
    )
    return home


def delivered(ranks: Ranks) -> dict[int, list[int]]:
    """The ids of each sample, by its number."""
    ids: dict[int, list[int]] = {}
    for shards in ranks.shards.values():
        for shard in shards:
            for microbatch in shard.microbatches:
                starts = np.asarray(microbatch.cu_seqlens)
                whole = np.asarray(microbatch.input_ids)
                for sample, start, length in zip(
                    microbatch.sample_ids.tolist(), starts, microbatch.lengths, strict=False
                ):
                    ids[sample] = whole[start : start + int(length)].tolist()
    return ids


def swap_ids(home: Path, first: int, second: int) -> dict[int, int]:
    """Have two tokens of the tokenizer change ids, which changes no length; what each becomes."""
    path = home / "tokenizer" / "tokenizer.json"
    plain = json.loads(path.read_text())
    vocabulary = plain["model"]["vocab"]
    words = {number: word for word, number in vocabulary.items()}
    vocabulary[words[first]], vocabulary[words[second]] = second, first
    path.write_text(json.dumps(plain))
    return {first: second, second: first}


def two_words(home: Path, ids: dict[int, list[int]]) -> tuple[int, int]:
    """The two most frequent ids that are no control tokens."""
    plain = json.loads((home / "tokenizer" / "tokenizer.json").read_text())
    special = {token["id"] for token in plain["added_tokens"]}
    counts = Counter(token for tokens in ids.values() for token in tokens)
    first, second, *_ = [token for token, _ in counts.most_common() if token not in special]
    return first, second


def test_a_job_submitted_anew_is_decoded_by_its_new_tokenizer(service, home):
    service.cli("job", "submit", str(home / "job.yaml"))
    before = delivered(Ranks(service.address, 1).start().join())
    swapped = swap_ids(home, *two_words(home, before))
    indexed(home)
    service.cli("job", "delete", "job")
    service.cli("job", "submit", str(home / "job.yaml"))
    after = delivered(Ranks(service.address, 1).start().join())
    assert after == {
        sample: [swapped.get(token, token) for token in tokens] for sample, tokens in before.items()
    }


def test_a_tokenizer_replaced_under_a_running_job_ends_it_and_trains_nothing(service, home):
    job = write_job(home, plan={"memory_tokens": 1024}, epochs=20, ready_steps=1)
    service.cli("job", "submit", str(job))
    ranks = Ranks(service.address, 1, pace_s=0.2).start()
    wait_for(lambda: ranks.steps_done >= SAMPLES // 6 + 1)  # every sample has come once
    whole = delivered(ranks)
    swap_ids(home, *two_words(home, whole))
    for decoder in decoders(service.home):
        decoder.kill()
    with pytest.raises(ClientError, match=r"tokenizer.json.*not what the job was opened with"):
        ranks.join()
    trained = [delivered(Ranks("", 1, shards={0: [shard]})) for shard in ranks.shards[0]]
    assert all(ids.items() <= whole.items() for ids in trained)
    checked = service.cli("status", "--check", check=False)
    assert checked.returncode == 4, checked.stdout
