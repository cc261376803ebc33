"""`dataservice status` on real services: workers wait for slow storage, or have no room for more
decoded bytes; and a client trains nothing of what it reads."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest
import yaml

from dataservice.operate.tokens_file import make_token
from demo.media import draw_scene, encode_image
from soak.gate import Gate
from tests.service.moody_vision import IMPORT_PATH, NAME
from tests.service.object_store import object_store
from tests.service.small import indexed_job, make_corpus, write_tar
from tests.service.support import Ranks, ServiceProcess, dataservice, serving, wait_for

pytestmark = pytest.mark.long

BUCKET = "far"
FAR = f"s3://{BUCKET}/images/images-{{0..1}}.tar"
EPOCHS = 2000
STEP_S = 0.15
USUAL_STEPS = 30  # behind the last 20 steps, whose seconds are the usual ones
IMAGE_PX = (336, 280)  # 0.28 MB decoded: three fit into the smallest memory that a worker may have
IMAGE_S = 2.4
IMAGE_STEP_S = 0.5
# Six slots decode a step of one image as fast as it is trained: five would do.
IMAGE_SLOTS = 6
A_STEP_IS_AN_IMAGE = {"batch": {"samples": 1}, "ready_steps": 8}
READ = r"source `images` is read at [\d.]+ of need, [\d.]+ s a sample, [\d.]+ s of it on a CPU"
WAITS = r"(rank \d waits|ranks 0-1 wait) [\d.]+ s a step"

READER = """
import sys
from trainer_client import ShardDataset
with ShardDataset(sys.argv[1], job="reading", rank=0, world_size=1) as dataset:
    dataset.expect_commits()
    for _ in dataset:
        pass
"""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small corpus, with larger images."""
    home = make_corpus(tmp_path_factory.mktemp("causes") / "corpus")
    rng = Random(7)
    for number in range(2):
        images = {
            f"image-{number}{k}.png": encode_image(draw_scene(rng), IMAGE_PX, "png", rng)
            for k in range(4)
        }
        write_tar(home / "images" / f"images-{number}.tar", images)
    return home


def a_job(
    corpus: Path,
    name: str,
    *,
    url: str = "images/images-*.tar",
    image_s: float = 0.0,
    **changes: Any,
) -> Path:
    """A job of images alone, each asleep in its slot for `image_s`; indexed without that, and
    before its storage is slow."""
    vision = {"kind": "custom", "name": NAME, "options": {"image_s": image_s}}
    given = {
        "sources": [{"name": "images", "format": "webdataset", "url": url}],
        "pipeline": {"tokenizer": "tokenizer", "vision": vision},
        "epochs": EPOCHS,
        "index": f"index-{name}",
    }
    return indexed_job(corpus, processors={NAME: IMPORT_PATH}, job=name, **given, **changes)


@contextmanager
def a_service(home: Path, **config: Any) -> Iterator[ServiceProcess]:
    """One worker."""
    home.mkdir(parents=True, exist_ok=True)
    plain = {"workers": 1, "custom_processors": {NAME: IMPORT_PATH}, **config}
    (home / "service.yaml").write_text(yaml.safe_dump(plain))
    with serving(home, "local", "--config", str(home / "service.yaml")) as service:
        yield service


def status(service: ServiceProcess, job: str, *arguments: str) -> str:
    """What `dataservice status` says of a job first."""
    shown = dataservice("status", job, "--json", "--service", service.address, *arguments).stdout
    (seen,) = json.loads(shown)["jobs"]
    return str(seen["findings"][0]["text"])


def says(service: ServiceProcess, job: str, sentence: str, *arguments: str) -> None:
    """Wait until `status` says this of a job: a pattern of the whole sentence."""
    heard: list[str] = []

    def heard_it() -> bool:
        heard.append(status(service, job, *arguments))
        return re.fullmatch(sentence, heard[-1]) is not None

    try:
        wait_for(heard_it, limit_s=90)
    except AssertionError:
        raise AssertionError(f"it never said {sentence!r}, and last {heard[-1]!r}") from None


# ---- storage --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def network(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gate]:
    """The way to an object store that holds the corpus."""
    log = tmp_path_factory.mktemp("store") / "store.log"
    with object_store(corpus, BUCKET, log) as gate:
        yield gate


@contextmanager
def slow(network: Gate, delay_s: float) -> Iterator[None]:
    """Every chunk passes this much later, either way."""
    network.delay(lambda _: True, delay_s)
    try:
        yield
    finally:
        network.heal()


def test_workers_that_wait_for_slow_storage_are_met_with_reads_and_not_with_workers(
    corpus, network, tmp_path
):
    job = a_job(corpus, "far", url=FAR)
    reads = r"the rest it waits for its storage: look there, or raise reads_per_worker [\d.]+ times"
    with a_service(tmp_path, slots_per_worker=2, reads_per_worker=2) as service, slow(network, 0.1):
        service.cli("job", "submit", str(job))
        ranks = Ranks(service.address, 2, job="far", pace_s=STEP_S, measured_s=STEP_S).start()
        says(service, "far", f"{WAITS}: {READ}; {reads}, for a read that waits takes neither.*")
        ranks.stop_at_one_step()


def test_storage_that_becomes_slow_is_named_with_its_usual_pace(corpus, network, tmp_path):
    job = a_job(corpus, "fading", url=FAR)
    with a_service(tmp_path, slots_per_worker=2, reads_per_worker=2) as service:
        service.cli("job", "submit", str(job))
        ranks = Ranks(service.address, 2, job="fading", pace_s=0.4, measured_s=0.4).start()
        wait_for(lambda: ranks.steps_done >= USUAL_STEPS, limit_s=90)
        wait_for(lambda: "usual" not in status(service, "fading"), limit_s=90)
        with slow(network, 0.2):
            usual = r"where [\d.]+ s is usual; look at its storage"
            says(service, "fading", f"{WAITS}: {READ}, {usual}")
        ranks.stop_at_one_step()


# ---- memory ---------------------------------------------------------------------------------


def test_workers_whose_memory_is_full_are_named_though_slots_are_free(corpus, tmp_path):
    job = a_job(corpus, "full", image_s=IMAGE_S, **A_STEP_IS_AN_IMAGE)
    full = r"the workers' memory is full, and a pack waits [\d.]+ s for room before it is decoded"
    config = {"slots_per_worker": IMAGE_SLOTS, "held_bytes_per_worker": 2**20}
    with a_service(tmp_path, **config) as service:
        service.cli("job", "submit", str(job))
        pace = {"pace_s": IMAGE_STEP_S, "measured_s": IMAGE_STEP_S}
        ranks = Ranks(service.address, 1, job="full", **pace).start()
        says(service, "full", f"{WAITS}: {full}; raise held_bytes_per_worker, or add workers")
        ranks.stop_at_one_step()


def test_a_team_that_holds_all_the_bytes_it_may_is_told_which_limit_holds_it_back(corpus, tmp_path):
    job = a_job(corpus, "bounded", image_s=IMAGE_S, **A_STEP_IS_AN_IMAGE)
    full = "its team holds all the decoded bytes that it may, so that steps are decoded only when"
    remedy = "they are asked for; raise the team's max_ready_bytes"
    token, record = make_token(team="vision", role="team", name="vision")
    (tmp_path / "tokens.yaml").write_text(yaml.safe_dump([record.model_dump(mode="json")]))
    (tmp_path / "token").write_text(token)
    own = ("--token-file", str(tmp_path / "token"))
    config = {
        "slots_per_worker": IMAGE_SLOTS,
        "tokens_file": str(tmp_path / "tokens.yaml"),
        "allowed_roots": "any",
        "teams": {"vision": {"max_ready_bytes": 600_000}},
    }
    with a_service(tmp_path / "service", **config) as service:
        service.cli("job", "submit", str(job), *own)
        pace = {"pace_s": IMAGE_STEP_S, "measured_s": IMAGE_STEP_S}
        ranks = Ranks(service.address, 1, job="bounded", token=token, **pace).start()
        says(service, "bounded", f"{WAITS}: {full} {remedy}", *own)
        ranks.stop_at_one_step()


# ---- no trainer -----------------------------------------------------------------------------


def test_a_client_that_commits_nothing_is_told_from_a_trainer_in_its_first_steps(corpus, tmp_path):
    job = a_job(corpus, "reading", image_s=0.05)
    reads = r"rank 0 only reads: \d+ steps begun, none committed(, and waited [\d.]+ s a step for "
    reads += r"data)?; a trainer commits each step that it has trained"
    with a_service(tmp_path) as service:
        service.cli("job", "submit", str(job))
        reader = subprocess.Popen([sys.executable, "-c", READER, service.address])
        try:
            says(service, "reading", reads)
        finally:
            reader.kill()
            reader.wait()
