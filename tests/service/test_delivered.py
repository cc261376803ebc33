"""Token ids and bytes of media are compared with what was delivered before, not plans alone."""

import json
import shutil
import sqlite3
import zlib
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from dataservice.core.content import StepContent, content_of
from dataservice.core.layout import sample_starts
from dataservice.core.sample import DecodedSample
from dataservice.jobs.sample_pipeline import decoder_of, reader_of
from dataservice.jobs.setup import job_records, open_job
from dataservice.workers.sample_digest import sample_digests
from soak.service import ServiceProcess
from tests.cli.support import CommandLine
from tests.service.small import beheaded_member, make_corpus, spoil, write_job
from tests.service.support import Ranks, differing_bytes, explained, serving, wait_for
from trainer_client import ClientError

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory, cli: CommandLine) -> Path:
    home = make_corpus(tmp_path_factory.mktemp("pristine") / "corpus")
    cli.ok("index", write_job(home), "--processes", "1")
    return home


@pytest.fixture
def home(tmp_path: Path, pristine: Path) -> Path:
    """A corpus of the test's own; its job is indexed again where the time of a file counts."""
    return shutil.copytree(pristine, tmp_path / "corpus")


@pytest.fixture
def service(tmp_path: Path, home: Path, cli: CommandLine) -> Iterator[ServiceProcess]:
    """A service at which the job is registered."""
    with serving(tmp_path / "service") as running:
        cli.service = running.address
        cli.ok("index", home / "job.yaml", "--processes", "1")
        cli.ok("job", "submit", home / "job.yaml")
        yield running


def exchange_ids(home: Path) -> None:
    """Two words of the tokenizer's vocabulary change their numbers, each pair of them: every text
    keeps its length, and its ids are others."""
    path = home / "tokenizer" / "tokenizer.json"
    plain = json.loads(path.read_text())
    vocabulary = plain["model"]["vocab"]
    fixed = {added["content"] for added in plain["added_tokens"]}
    words = sorted((word for word in vocabulary if word not in fixed), key=vocabulary.get)
    for one, other in zip(words[::2], words[1::2], strict=False):
        vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]
    path.write_text(json.dumps(plain))


def renew_workers(service: ServiceProcess, cli: CommandLine) -> None:
    """Workers without any pipeline that was built before."""
    cli.ok("workers", "restart")


def noted(ranks: Ranks, cli: CommandLine) -> None:
    """Wait until the ledger has what each step delivered: the ranks may have trained the last ones
    before workers told of all their packs."""

    def digest(step: int) -> str | None:
        said = cli.ok("explain", "job", "--step", str(step), "--json")
        return json.loads(said.out)["content_digest"]

    for step in ranks.digests:
        wait_for(lambda step=step: digest(step))


def recorded(service: ServiceProcess) -> dict[int, bytes]:
    """What the ledger has of each step."""
    with closing(sqlite3.connect(service.state_dir / "state.db")) as state:
        return dict(state.execute("SELECT step, content FROM ledger ORDER BY step"))


def test_other_ids_of_the_same_lengths_are_found_by_a_replay_of_the_content(home, service, cli):
    ranks = Ranks(service.address, 2).start().join()
    noted(ranks, cli)
    last = max(ranks.digests)
    replay = ("job", "replay", "job", "--steps", f"0-{last}")
    same = json.loads(cli.ok(*replay, "--content", "--json").out)
    assert (same["content_compared"], same["content_unknown"], same["differing"]) == (True, [], [])
    assert f"{last + 1} deliver the same bytes, 0 differ" in cli.ok(*replay, "--content").said

    exchange_ids(home)
    renew_workers(service, cli)
    plans = cli.ok(*replay).said
    assert f"{last + 1} plan as recorded, 0 differ" in plans
    assert "plans are compared; what is delivered is not: --content compares it" in plans
    assert not json.loads(cli.ok(*replay, "--json").out)["content_compared"]
    said = cli.refused(*replay, "--content", code=3)
    assert "0 deliver the same bytes" in said
    assert "the first is step 0 of attempt 1" in said
    found = json.loads(cli(*replay, "--content", "--json").out)["differing"]
    assert [step["step"] for step in found] == list(range(last + 1))
    assert {step["content"] for step in found} == {"differs"}

    cli.ok("index", home / "job.yaml", "--processes", "1")  # and so does the tests' own audit
    assert any("other tokens" in line for line in differing_bytes(ranks, home / "job.yaml"))


def test_trainers_that_resume_are_not_given_other_ids_for_steps_that_were_trained(
    home, service, cli
):
    kept = Ranks(service.address, 2).start(stop_after=1).join()
    Ranks(service.address, 2).start(state=kept.state).join()
    exchange_ids(home)
    renew_workers(service, cli)
    resumed = Ranks(service.address, 2).start(state=kept.state)
    with pytest.raises(ClientError, match="tokenizer"):
        resumed.join()
    assert len(resumed.errors) == 2
    assert not any(resumed.shards.values())


def test_a_picture_replaced_in_place_is_named_with_its_step_and_pack(home, service, cli):
    ranks = Ranks(service.address, 2).start().join()
    noted(ranks, cli)
    spoil(home / "images" / "images-0.tar", beheaded_member("image-00.jpg"))
    steps = f"0-{max(ranks.digests)}"
    done = cli("job", "replay", "job", "--steps", steps, "--content", "--json")
    (wrong,) = json.loads(done.out)["differing"]
    assert done.code == 3
    assert "images/image-00" in wrong["note"]
    (pack,) = wrong["packs"]
    assert "images/image-00" in pack["samples"]
    explanation = explained(service, wrong["step"])
    assert set(pack["samples"]) <= set(explanation["samples"])
    assert json.loads(cli.ok("job", "quarantine", "job", "--json").out) == []


def test_what_is_recorded_is_what_a_decode_past_the_service_gives(home, service, cli):
    """And so is what the ranks received."""
    ranks = Ranks(service.address, 2).start().join()
    assert differing_bytes(ranks, home / "job.yaml") == []
    noted(ranks, cli)
    of = {step: explained(service, step) for step in ranks.digests}
    service.stop()
    found = recorded(service)
    assert len(found) == len(of) > 3
    setup = open_job(
        job_records((home / "job.yaml").read_text(), str(home))[0], custom_processors={}
    )
    for step, explanation in of.items():
        ids = np.array(explanation["plan"]["sample_ids"]["values"], dtype=np.int64)
        decoded = [past_the_service(setup, int(sample)) for sample in ids]
        assert explanation["content_digest"] == found[step].hex()
        assert StepContent.from_bytes(found[step]) == content_beside(ids, decoded, setup)


def past_the_service(setup, sample: int) -> DecodedSample:
    ref, lengths = setup.catalog.details(np.array([sample]))[0]
    decoder = decoder_of({}, setup.pipeline)
    return decoder.decode(reader_of(setup.pipeline).read(ref), lengths)


def content_beside(ids, decoded, setup) -> StepContent:
    lengths = np.array([len(each.input_ids) for each in decoded])
    whole = {
        "input_ids": np.concatenate([each.input_ids for each in decoded]),
        "labels": np.concatenate([each.labels for each in decoded]),
        "position_ids": np.concatenate([np.arange(n, dtype=np.int32) for n in lengths]),
    }
    pad = decoder_of({}, setup.pipeline).pad_token_id
    crc32s = [zlib.crc32(item.tobytes()) for each in decoded for item in each.items]
    digests = sample_digests(whole, sample_starts(lengths), decoded, crc32s, pad_token_id=pad)
    return content_of(ids, np.frombuffer(digests, dtype="<u8"), ())
