"""What goes wrong with inputs is said once, plainly, and costs nothing but the repair.

Each error names the value seen, the limit and the remedy; once the cause is mended, the same
command or the same start of the trainers works, and an epoch visits each sample exactly once.
"""

import json
import os
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from dataservice_proto.columns import VERSION
from dataservice_proto.v1 import coordinator_pb2, coordinator_pb2_grpc

from tests.cli.support import CommandLine, Done, says
from tests.service.small import (
    CLIPS,
    IMAGES,
    LONG_TEXT,
    SAMPLES,
    TEXTS,
    beheaded_member,
    cut_off,
    damaged_member,
    make_corpus,
    spoil,
    write_job,
    write_jsonl,
)
from tests.service.support import Ranks, ServiceProcess, serving, wait_for
from trainer_client import (
    ClientError,
    CursorMismatch,
    RankAlreadyClaimed,
    RankOutOfRange,
    RequestRefused,
    ServiceUnreachable,
    Shard,
    ShardDataset,
    UnknownJob,
    WrongWorldSize,
)

pytestmark = pytest.mark.long


@dataclass
class Job:
    """A job over a corpus of its own, on the service that the module shares."""

    home: Path
    name: str
    cli: CommandLine
    service: ServiceProcess

    def write(self, **changes: Any) -> Path:
        return write_job(self.home, job=self.name, **changes)

    @property
    def file(self) -> Path:
        return self.home / f"{self.name}.yaml"

    def index(self) -> Done:
        return self.cli.ok("index", self.file, "--processes", "1")

    def register(self) -> None:
        self.index()
        self.cli.ok("job", "submit", self.file)

    def refused(self, *command: str) -> str:
        return self.cli.refused(*command, self.file)

    def train(self, world_size: int = 2) -> Ranks:
        return Ranks(self.service.address, world_size, job=self.name).start().join()

    def refuses(self, world_size: int = 2) -> list[Exception]:
        """Start ranks that must all fail, and how each did."""
        ranks = Ranks(self.service.address, world_size, job=self.name).start()
        with pytest.raises(ClientError):
            ranks.join()
        assert len(ranks.errors) == world_size
        return list(ranks.errors.values())

    def shows_masked(self, samples: int) -> dict[str, Any]:
        """Its status once so many samples are known to be masked: a worker may tell of them after
        the ranks have trained them."""

        def known() -> dict[str, Any] | None:
            shown = self.cli.ok("job", "show", self.name, "--json", "--service", self.address).out
            (status,) = json.loads(shown)
            listed = len(status["quarantine"])
            return status if status["quarantined"] == listed >= samples else None

        return wait_for(known)

    @property
    def address(self) -> str:
        return self.service.address

    def visits_each_once(self, samples: int = SAMPLES) -> None:
        """Train an epoch and audit it."""
        assert self.train().visits == dict.fromkeys(range(samples), 1)


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("pristine") / "corpus")


@pytest.fixture
def job(tmp_path: Path, pristine: Path, cli: CommandLine, service: ServiceProcess) -> Job:
    cli.service = service.address
    home = shutil.copytree(pristine, tmp_path / "corpus")
    made = Job(home=home, name=tmp_path.name, cli=cli, service=service)
    made.write()
    return made


# ---- sources ------------------------------------------------------------------------------


def test_a_missing_source_is_named_and_nothing_is_lost_once_it_is_there(job):
    tar = job.home / "images" / "images-0.tar"
    job.write(
        sources=[{"name": "images", "format": "webdataset", "url": "images/images-{0..1}.tar"}]
    )
    away = tar.rename(job.home / "away.tar")
    says(job.refused("index"), "source 'images'", tar, "Correct the source's url or restore")
    away.rename(tar)
    job.register()
    job.visits_each_once(IMAGES)


def test_a_pattern_that_matches_nothing_is_named(job):
    job.write(sources=[{"name": "texts", "format": "jsonl", "url": "nowhere/*.jsonl"}])
    says(job.refused("index"), "source 'texts' is empty", "nowhere/*.jsonl", "Correct the source's")


def test_an_unreadable_source_is_named_and_finished_files_are_kept(job):
    tar = job.home / "images" / "images-1.tar"
    whole = tar.read_bytes()
    cut_off(tar)
    says(job.refused("index"), "source 'images'", tar, "truncated", "Copy the file again")
    tar.write_bytes(whole)
    (images, *_) = json.loads(job.cli.ok("index", job.file, "--processes", "1", "--json").out)
    assert images["files_reused"] == 1
    job.register()
    job.visits_each_once()


def test_all_damaged_files_of_all_sources_are_named_in_one_run_and_can_be_left_out(job):
    cut_off(job.home / "images" / "images-1.tar")
    write_jsonl(job.home / "texts" / "more.jsonl", [{"id": "more", "text": "more"}])
    (job.home / "texts" / "array.jsonl").write_text('[{"text": "one"}]')
    said = job.refused("index")
    says(said, "source 'images': 1 of its 2 files cannot be read", "images-1.tar: ", "truncated")
    says(said, "source 'texts': 1 of its 3 files cannot be read", "array.jsonl: ", "one JSON array")
    says(said, "clips", "--leave-out-damaged")  # the table has the source that is whole
    says(job.refused("job", "submit"), "no complete index")
    done = job.cli.ok("index", job.file, "--leave-out-damaged", "--processes", "1")
    says(done.said, "images: left out the file images-1.tar: ", "texts: left out the file array.js")
    listed = json.loads(
        job.cli.ok("index", job.file, "--leave-out-damaged", "--json", "--processes", "1").out
    )
    assert [len(each["left_out"]) for each in listed] == [1, 0, 1]
    assert [each["media"]["images"] for each in listed] == [IMAGES // 2, 0, 0]
    assert listed[1]["media"] == {"images": 0, "clips": CLIPS, "recordings": 0}
    assert all(each["tokens"]["p50"] <= each["tokens"]["longest"] for each in listed)
    job.cli.ok("job", "submit", job.file)
    job.visits_each_once(SAMPLES + 1 - IMAGES // 2)


def test_a_source_of_another_format_is_named(job):
    job.write(sources=[{"name": "texts", "format": "parquet", "url": "texts/texts.jsonl"}])
    says(job.refused("index"), "texts.jsonl is not a Parquet file", "correct the source's format")


# ---- stale index --------------------------------------------------------------------------


def add_a_line(home: Path) -> int:
    with (home / "texts" / "texts.jsonl").open("a") as stream:
        stream.write(json.dumps({"id": "one-more", "text": "one more"}) + "\n")
    return SAMPLES + 1


def add_a_file(home: Path) -> int:
    write_jsonl(home / "texts" / "zz.jsonl", [{"id": "one-more", "text": "one more"}])
    return SAMPLES + 1


def remove_a_file(home: Path) -> int:
    (home / "images" / "images-1.tar").unlink()
    return SAMPLES - IMAGES // 2


@pytest.mark.parametrize(
    ("change", "what", "which"),
    [
        (add_a_line, "1 file of another size", "texts.jsonl"),
        (add_a_file, "1 file added", "zz.jsonl"),
        (remove_a_file, "1 file removed", "images-1.tar"),
    ],
)
def test_a_stale_index_is_refused_and_indexing_again_mends_it(job, change, what, which):
    job.index()
    samples = change(job.home)
    says(job.refused("job", "submit"), "stale", what, which, "dataservice index")
    job.register()
    job.visits_each_once(samples)


def other_processor(job: Job) -> None:
    job.write(pipeline={"tokenizer": "tokenizer", "vision": {"kind": "llava"}})


def other_tokenizer(job: Job) -> None:
    path = job.home / "tokenizer" / "tokenizer.json"
    plain = json.loads(path.read_text())
    plain["model"]["merges"] = plain["model"]["merges"][:-40]
    path.write_text(json.dumps(plain))


@pytest.mark.parametrize("change", [other_processor, other_tokenizer])
def test_an_index_of_another_processor_or_tokenizer_is_refused(job, change):
    job.index()
    change(job)
    says(job.refused("job", "submit"), "processor", "tokenizer differs", "dataservice index")
    job.register()


def test_trainers_are_refused_when_data_changed_after_the_job_was_registered(job):
    texts = job.home / "texts" / "texts.jsonl"
    job.register()
    kept = job.home / "kept.jsonl"
    shutil.copy2(texts, kept)
    add_a_line(job.home)
    for error in job.refuses():
        says(error, "stale", "1 file of another size: texts.jsonl", "its checkpoints no longer fit")
    kept.replace(texts)  # with its time of change: the file that was indexed
    job.visits_each_once()


def test_a_job_registered_over_an_older_index_is_submitted_anew(job):
    job.register()
    samples = add_a_line(job.home)
    job.index()
    for said in (*job.refuses(), job.refused("job", "submit")):
        says(said, "its checkpoints fit. Or delete", "its checkpoints no longer fit")
    job.cli.ok("job", "delete", job.name)
    job.register()
    job.visits_each_once(samples)


# ---- job files that ask for the impossible ------------------------------------------------


@pytest.mark.parametrize("command", ["index", "job submit"])
def test_an_unknown_processor_is_refused_with_those_that_are_known(job, command):
    job.write(pipeline={"tokenizer": "tokenizer", "vision": {"kind": "clip_l"}})
    said = job.refused(*command.split())
    says(said, "pipeline.vision.kind", "'clip_l'", "qwen2_vl", "internvl", "llava", "gemma3")
    assert job.name not in job.cli.ok("job", "list").out


def test_a_sample_longer_than_all_replicas_hold_is_named_and_fits_with_more_ranks(job):
    job.register()
    (error,) = job.refuses(world_size=1)
    assert isinstance(error, RequestRefused)
    says(
        error,
        f"texts/{LONG_TEXT}",
        "1 of 1 replicas of 512",
        "hold at most 512",
        "Start more ranks",
    )
    job.visits_each_once()


def test_a_source_whose_weight_gives_no_sample_is_refused_with_the_least_that_does(job):
    def sources(weight: float) -> list[dict[str, Any]]:
        url = "clips/clips.jsonl"
        return [{"name": "clips", "format": "jsonl", "url": url, "weight": weight}]

    job.write(sources=sources(0.1))
    job.index()
    said = job.refused("job", "submit")
    says(said, "source 'clips' gives no sample: weight 0.1 of its 3 samples", "Raise its weight to")
    job.write(sources=sources(0.34))
    job.register()
    assert job.train().visits.total() == 1


def test_max_sample_tokens_leaves_long_samples_out_by_name(job):
    vision = {"kind": "qwen2_vl", "video_min_pixels": 3136}
    job.write(pipeline={"tokenizer": "tokenizer", "vision": vision, "max_sample_tokens": 512})
    says(
        job.index().said,
        "texts: left out 1 ×",
        f"First: texts/{LONG_TEXT}",
        "max_sample_tokens is 512",
    )
    job.register()
    assert job.train(world_size=1).visits == dict.fromkeys(range(SAMPLES - 1), 1)


def test_a_document_that_no_rank_holds_is_cut_into_samples_that_train(job):
    sources = [{"name": "texts", "format": "jsonl", "url": "texts/*.jsonl"}]
    limited = {"tokenizer": "tokenizer", "longer_than": {"tokens": 512}}
    job.write(sources=sources, pipeline=limited)
    says(
        job.refused("index"),
        "source 'texts': 1 sample has more than the 512 tokens of pipeline.longer_than",
        "then: cut",
    )
    says(job.refused("job", "submit"), "source 'texts': 1 sample has more than the 512 tokens")

    limited["longer_than"] = {"tokens": 256, "then": "cut"}
    job.write(sources=sources, pipeline=limited)
    says(job.index().said, "texts: 1 long document is cut into")
    job.cli.ok("job", "submit", job.file)
    (summary,) = json.loads(job.cli.ok("index", job.file, "--json").out)
    assert summary["rows"] == TEXTS - 1 + summary["long"]["pieces"]
    assert job.train(world_size=1).visits == dict.fromkeys(range(summary["rows"]), 1)

    last = str(summary["rows"] - 1)
    found = json.loads(job.cli.ok("explain", job.name, "--sample", last, "--json").out)
    assert found["key"] == f"{LONG_TEXT}#{summary['long']['pieces']}"
    assert found["location"]["piece"] == summary["long"]["pieces"]
    assert found["preview"]["llm_tokens"] <= 256
    assert [step["masked"] for step in found["steps"]] == [""]


# ---- bad samples --------------------------------------------------------------------------


def test_samples_that_are_bad_when_indexed_are_left_out_by_name(job):
    spoil(job.home / "images" / "images-0.tar", beheaded_member("image-00.jpg"))
    cut_off(job.home / "clips" / "clip-1.mp4")
    write_jsonl(
        job.home / "texts" / "bad.jsonl",
        [{"id": "no-text", "text": ""}, {"id": "no-turns", "conversations": []}],
    )
    with (job.home / "texts" / "bad.jsonl").open("a") as stream:
        stream.write("{broken\n")
    said = job.index().said
    says(said, "images: left out 1 × image 'image-00.jpg'", "no header of a known format")
    says(said, "clips: left out 1 × video 'clip-1.mp4'", "damaged, truncated or of a kind")
    says(said, "texts: left out 1 × ", "is not valid JSON")
    listed = json.loads(job.cli.ok("index", job.file, "--json").out)
    assert [(each["rows"], len(each["skipped"])) for each in listed] == [
        (IMAGES - 1, 1),
        (CLIPS - 1, 1),
        (TEXTS, 3),
    ]
    job.cli.ok("job", "submit", job.file)
    job.visits_each_once(SAMPLES - 2)


def test_all_bad_samples_of_a_source_are_in_the_list_that_is_named(job):
    records = [{"id": f"empty-{k}", "text": ""} for k in range(8)]
    write_jsonl(job.home / "texts" / "bad.jsonl", records)
    said = job.index().said
    says(said, "texts: left out 8 × the sample is empty")
    (named,) = re.findall(r"texts: all are listed in (\S+/left_out\.jsonl)", said)
    lines = Path(named).read_text().splitlines()
    assert [json.loads(line)["key"] for line in lines] == [f"empty-{k}" for k in range(8)]


def test_a_source_without_one_usable_sample_is_refused(job):
    write_jsonl(job.home / "texts" / "texts.jsonl", [{"id": "empty", "text": ""}])
    said = job.refused("index")
    says(said, "source 'texts': not one of its 1 samples", "1 × ", "First: texts/empty", "Mend")
    write_jsonl(job.home / "texts" / "texts.jsonl", [])
    says(job.refused("index"), "source 'texts' is empty", "hold no jsonl sample", "Correct")


BAD = {
    "images/image-00": "changed since indexing",
    "images/image-12": "changed since indexing",
    "clips/clip-0": "changed since indexing",
}


def test_samples_that_went_bad_after_indexing_are_masked_and_the_rest_is_untouched(job):
    job.register()
    before = job.train()
    spoil(job.home / "images" / "images-0.tar", beheaded_member("image-00.jpg"))
    spoil(job.home / "images" / "images-1.tar", damaged_member("image-12.png"))
    cut_off(job.home / "clips" / "clip-0.mp4")
    after = job.train()
    assert after.digests == before.digests
    assert after.visits == dict.fromkeys(range(SAMPLES), 1)
    status = job.shows_masked(len(BAD))
    masked = {entry["sample_id"]: entry for entry in status["quarantine"]}
    assert {f"{e['source']}/{e['key']}" for e in masked.values()} == set(BAD)
    assert status["quarantined"] == len(BAD)
    for rank, shards in after.shards.items():
        for shard, same in zip(shards, before.shards[rank], strict=True):
            assert_masked_alone(shard, same, set(masked))
    said = job.cli.ok("job", "show", job.name).said
    for entry in masked.values():
        key = f"{entry['source']}/{entry['key']}"
        says(entry["reason"], BAD[key])
        says(said, f"quarantined in step {entry['step']} of attempt 2: {key}: ")
        explained = job.cli.ok("explain", job.name, "--step", str(entry["step"])).said
        says(explained, f"quarantined {key}: {' '.join(entry['reason'].split()[:4])}")


def test_limits_of_the_operators_config_hold_when_indexing_and_when_serving(job, tmp_path):
    config = tmp_path / "service.yaml"
    config.write_text("limits: {max_text_bytes: 1500, max_media_bytes: 300_000}")
    limited = ("--config", str(config))
    job.index()
    with serving(tmp_path / "own", "local", *limited) as service:
        mine = replace(job, service=service)
        submit = ("job", "submit", job.file, "--service", service.address)
        says(job.cli.refused(*submit), "differs", "dataservice index")
        said = job.cli.ok("index", job.file, "--processes", "1", *limited).said
        says(
            said,
            "texts: left out 1 ×",
            f"First: texts/{LONG_TEXT}",
            "the limit max_text_bytes is 1,500",
        )
        job.cli.ok(*submit)
        os.truncate(job.home / "clips" / "clip-0.mp4", 300_001)
        mine.visits_each_once(SAMPLES - 1)
        (entry,) = mine.shows_masked(1)["quarantine"]
        assert entry["key"] == "clip-0"
        says(entry["reason"], "300,001", "the limit max_media_bytes is 300,000")


def assert_masked_alone(shard: Shard, same: Shard, bad: set[int]) -> None:
    """`shard` is `same` but for the samples in `bad`, whose labels are masked and media blank."""
    assert shard.plan.loss_tokens == same.plan.loss_tokens
    for now, then in zip(shard.microbatches, same.microbatches, strict=True):
        assert now.sample_ids.tolist() == then.sample_ids.tolist()
        assert now.cu_seqlens.tolist() == then.cu_seqlens.tolist()
        bounds = now.cu_seqlens.numpy() // len(now.cp_group)
        for place, sample in enumerate(now.sample_ids.tolist()):
            mine = slice(bounds[place], bounds[place + 1])
            if sample in bad:
                assert (now.labels[mine] == -100).all()
            else:
                assert now.labels[mine].tolist() == then.labels[mine].tolist()
                assert now.input_ids[mine].tolist() == then.input_ids[mine].tolist()
        for seen, wanted in ((now.vision, then.vision), (now.audio, then.audio)):
            items = zip(seen.items, wanted.items, strict=True) if seen and wanted else ()
            for item, whole in items:
                assert item.shape == whole.shape
                assert np.array_equal(item, whole) or not item.any()


# ---- ranks --------------------------------------------------------------------------------


def first_shard(job: Job, rank: int, world_size: int) -> Shard:
    with ShardDataset(
        job.service.address, job=job.name, rank=rank, world_size=world_size, timeout_s=60.0
    ) as dataset:
        return next(iter(dataset))


def open_ranks(job: Job, *ranks: tuple[int, int]) -> list[BaseException | None]:
    """Open (rank, world size) pairs at once; the errors they end with."""
    with ThreadPoolExecutor(len(ranks)) as threads:
        opened = [threads.submit(first_shard, job, *each) for each in ranks]
        return [each.exception(120.0) for each in opened]


def test_ranks_that_disagree_on_the_world_size_are_all_told_both_numbers(job):
    job.register()
    errors = open_ranks(job, (0, 2), (1, 3))
    assert [type(error) for error in errors] == [WrongWorldSize, WrongWorldSize]
    for error in errors:
        assert set(re.findall(r"opened with (?:world size )?(\d)", str(error))) == {"2", "3"}
        says(error, "Start all ranks with one world size")
    job.visits_each_once()


def test_ranks_that_resume_at_different_steps_are_all_told_both_steps(job):
    job.register()
    address = job.service.address
    checkpoints = [
        Ranks(address, 2, job=job.name).start(stop_after=steps).join().state for steps in (1, 3)
    ]

    def resume(rank: int) -> Exception:
        with ShardDataset(address, job=job.name, rank=rank, world_size=2) as dataset:
            dataset.load_state_dict(checkpoints[rank])
            with pytest.raises(CursorMismatch) as refused:
                next(iter(dataset))
        return refused.value

    with ThreadPoolExecutor(2) as threads:
        for error in threads.map(resume, (0, 1)):
            assert set(re.findall(r"at step (\d)", str(error))) == {"1", "3"}
            says(error, "Load the same checkpoint on every rank")
    rest = Ranks(address, 3, job=job.name).start(state=checkpoints[0]).join()
    assert rest.visits.total() == SAMPLES - 6


def test_a_world_size_that_replicas_do_not_divide_is_refused(job):
    job.write(topology={"tensor_parallel": 2})
    job.register()
    for error in job.refuses(world_size=3):
        assert isinstance(error, WrongWorldSize)
        says(error, "world size 3 is not a multiple of 2", "change the job's topology")
    assert job.train(world_size=4).visits == dict.fromkeys(range(SAMPLES), 2)  # on both of a pair


def test_a_rank_out_of_range_is_refused_by_the_client_and_by_the_service(job):
    with pytest.raises(RankOutOfRange, match=r"rank 2 is outside 0\.\.1.*RANK and WORLD_SIZE"):
        ShardDataset(job.service.address, job=job.name, rank=2, world_size=2)
    job.register()
    with grpc.insecure_channel(job.service.address) as channel:
        stub = coordinator_pb2_grpc.CoordinatorStub(channel)
        request = coordinator_pb2.OpenSessionRequest(
            columns=VERSION, job=job.name, rank=2, world_size=2
        )
        with pytest.raises(grpc.RpcError, match=r"rank 2 is outside 0\.\.1"):
            next(stub.OpenSession(request))
    job.visits_each_once()


def test_a_second_client_of_a_rank_is_refused_and_the_first_goes_on(job):
    job.write(plan={"memory_tokens": 1024})
    job.register()
    with ShardDataset(job.service.address, job=job.name, rank=0, world_size=1) as first:
        mine = iter(first)
        assert next(mine).step == 0
        with pytest.raises(RankAlreadyClaimed, match=r"rank 0 .* is held by .*its own RANK"):
            first_shard(job, 0, 1)
        assert next(mine).step == 1
    job.visits_each_once()


# ---- names and addresses ------------------------------------------------------------------


def test_an_unknown_job_is_refused_with_those_that_are_known(job):
    job.register()
    nobody = replace(job, name="nobody")
    (error,) = nobody.refuses(world_size=1)
    assert isinstance(error, UnknownJob)
    says(error, "no job 'nobody'", job.name, "dataservice job submit")
    said = job.cli.refused("job", "show", "nobody")
    says(said, "no job 'nobody'", job.name, "dataservice job submit")


def test_an_unreachable_service_is_named_with_what_to_check(job):
    nowhere = ShardDataset("127.0.0.1:9", job="job", rank=0, world_size=1, connect_timeout_s=0.5)
    with pytest.raises(ServiceUnreachable, match=r"127\.0\.0\.1:9 after 0\.5 s.*Check that"):
        next(iter(nowhere))
    said = job.cli.refused("status", "--service", "127.0.0.1:9")
    says(said, "no service answers at 127.0.0.1:9", "Check that")


def test_what_broke_while_the_service_was_down_is_mended_while_it_runs(job, tmp_path):
    """The service starts over data that changed, refuses that job alone, and takes it up again."""
    texts = job.home / "texts" / "texts.jsonl"
    with serving(tmp_path / "own") as service:
        mine = replace(job, service=service)
        mine.index()
        mine.cli.ok("job", "submit", job.file, "--service", service.address)
        first = Ranks(service.address, 2, job=job.name).start(stop_after=2).join()
        service.stop()
        kept = job.home / "kept.jsonl"
        shutil.copy2(texts, kept)
        add_a_line(job.home)
        service.start()
        for error in mine.refuses():
            says(error, "stale", texts.name)
        says(job.cli.ok("job", "list", "--service", service.address).said, job.name)
        kept.replace(texts)
        second = Ranks(service.address, 2, job=job.name).start(state=first.state).join()
    assert first.visits + second.visits == dict.fromkeys(range(SAMPLES), 1)
