"""Packs go where their samples are kept, and to workers beside their ranks: real workers, each with
a disk and a node of its own, which are folders and names here."""

import asyncio
import threading
from collections import Counter
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from random import Random

import pytest

import trainer_client.run
from dataservice.app import start_service
from dataservice.operate import fleet
from dataservice.operate.config import ServiceConfig
from dataservice.operate.fleet import serve_worker_process
from dataservice.planning import place_packs
from dataservice.workers.host import DecodingHost
from demo.media import draw_scene, encode_image
from demo.tokenizer import train_tokenizer
from tests.service.small import indexed_job, write_job, write_tar
from tests.service.support import Ranks, free_ports, scraped
from tests.service.support import dataservice as command
from tests.waiting import LIMIT_S, wait_for
from trainer_client.parts import EVERYTHING

pytestmark = pytest.mark.long

IMAGES = 48
SOURCES = [{"name": "images", "format": "webdataset", "url": "images/images-*.tar"}]
# Packs of one, two and three pictures.
SETTINGS = {"sources": SOURCES, "batch": {"samples": 12}, "plan": {"memory_tokens": 128}}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    home = tmp_path_factory.mktemp("corpus")
    (home / "images").mkdir()
    rng = Random(3)
    for tar in range(3):
        pictures = {
            f"image-{tar}{k:02d}.jpg": encode_image(
                draw_scene(rng), rng.choice([(112, 84), (140, 112), (168, 140)]), "jpg", rng
            )
            for k in range(IMAGES // 3)
        }
        write_tar(home / "images" / f"images-{tar}.tar", pictures)
    (home / "texts").mkdir()
    (home / "texts" / "texts.jsonl").write_text('{"text": "what is it? a shape on a ground"}\n')
    train_tokenizer(home, home / "tokenizer")
    indexed_job(home, **SETTINGS)
    return home


@dataclass
class Fleet:
    """A service, and what its workers say of themselves, by name."""

    address: str = ""
    metrics: str = ""
    hosts: dict = field(default_factory=dict)
    sent: dict = field(default_factory=dict)
    service: object = None
    loop: object = None

    @property
    def reused(self):
        """Samples that were found in caches."""
        return sum(host.stats().samples_reused for host in self.hosts.values())

    @property
    def decoded(self):
        return sum(host.stats().samples_decoded for host in self.hosts.values())

    def bytes_of(self, seat):
        """Bytes by path that the workers of a seat sent."""
        of = (sent for name, sent in self.sent.items() if name.startswith(f"worker-{seat}."))
        return sum(of, Counter())


@contextmanager
def serving(home, monkeypatch, *, workers=2, caches=True):
    """A service in a thread of its own. Each seat's workers have a cache and a node."""
    made = Fleet()

    starting = ContextVar("starting")

    async def apart(settings, serve_host, worker, *, nursery):
        seat = worker.removeprefix("worker-").partition(".")[0]
        kept = str(home / f"cache-{seat}") if caches else None
        starting.set(worker)

        async def seen(host, *, where, sent, **more):
            made.sent[worker] = sent
            where = replace(where, node=f"node-{seat}")
            return await serve_host(host, where=where, sent=sent, **more)

        mine = replace(settings, decoded_cache=kept)
        return await serve_worker_process(mine, seen, worker, nursery=nursery)

    def kept_in_sight(*given, **more):
        host = made.hosts[starting.get()] = DecodingHost(*given, **more)
        return host

    monkeypatch.setattr(fleet, "serve_worker_process", apart)
    monkeypatch.setattr(fleet, "DecodingHost", kept_in_sight)
    (home / "state").mkdir(parents=True)
    made.metrics = f"127.0.0.1:{free_ports(1)}"
    config = ServiceConfig(
        listen="127.0.0.1:0",
        metrics_listen=made.metrics,
        state_dir=str(home / "state"),
        workers=workers,
        pool="local",
    )
    ready, over = threading.Event(), asyncio.Event()

    async def serve_until_over():
        made.loop = asyncio.get_running_loop()
        made.service = await start_service(config)
        await made.service.staffing
        made.address = made.service.address
        ready.set()
        await over.wait()
        await made.service.stop(0.5)

    thread = threading.Thread(target=lambda: asyncio.run(serve_until_over()))
    thread.start()
    try:
        assert ready.wait(LIMIT_S)
        yield made
    finally:
        made.loop.call_soon_threadsafe(over.set)
        thread.join(30)


def submit(made, path):
    command("job", "submit", str(path), "--service", made.address)


def trained(made, path, *, world=2, **more):
    """All steps of a job that is new."""
    submit(made, path)
    job = path.stem
    return Ranks(made.address, world_size=world, job=job, **more).start().join()


def job(corpus, name, **changes):
    return write_job(corpus, job=name, **{**SETTINGS, **changes})


def placed_tokens(made, job):
    """Decode work that was placed, by where, in tokens."""
    series = scraped(made.metrics).items()
    return {
        dict(labels)["where"]: value
        for (name, labels), value in series
        if name == "dataservice_placed_tokens_total" and ("job", job) in labels
    }


@pytest.fixture
def room_everywhere(monkeypatch):
    """However much is queued where a pack is drawn to, it goes there: which worker has room when a
    step is placed depends on how fast the machine is. How far load counts, test_place_packs shows.
    """
    monkeypatch.setattr(place_packs, "SLACK", 1e6)


def test_the_second_epoch_finds_most_of_what_the_first_one_decoded(
    corpus, tmp_path, monkeypatch, room_everywhere
):
    with serving(tmp_path, monkeypatch) as made:
        trained(made, job(corpus, "twice", epochs=2))
        assert made.decoded == 2 * IMAGES
        # The packs of the second are others; of two or three pictures one may be kept elsewhere.
        assert made.reused > 0.6 * IMAGES
        placed = placed_tokens(made, "twice")
        assert placed["cached"] > 0.6 * placed["anywhere"], "homes count in the first as well"


def test_a_second_job_and_a_replayed_step_find_what_the_first_job_left(
    corpus, tmp_path, monkeypatch, room_everywhere
):
    with serving(tmp_path, monkeypatch) as made:
        trained(made, job(corpus, "first"))
        assert made.reused == 0
        trained(made, job(corpus, "second"))
        assert made.reused >= 0.75 * IMAGES
        before, reused = made.decoded, made.reused
        steps = ("--steps", "0-2", "--content")
        command("job", "replay", "first", *steps, "--service", made.address)
        assert made.reused - reused >= 0.6 * (made.decoded - before) > 0


def test_a_rank_beside_a_worker_gets_its_packs_from_there_through_memory(
    corpus, tmp_path, monkeypatch
):
    here = threading.local()
    monkeypatch.setattr(trainer_client.run, "node_and_zone", lambda: (here.node, ""))

    def everything_at_its_node(rank):  # called by the rank's own thread
        here.node = f"node-{rank}"
        return EVERYTHING

    with serving(tmp_path, monkeypatch, caches=False) as made:
        path = job(corpus, "beside", epochs=2)
        submit(made, path)
        ranks = Ranks(made.address, world_size=2, job="beside", parts_of=everything_at_its_node)
        ranks.start().join()
        counted = placed_tokens(made, "beside")
        # By chance it would be half; a worker behind with its queue leaves some to the other.
        assert counted["same_node"] > 0.6 * counted["anywhere"]
        assert counted["cached"] == 0
        for seat in (0, 1):
            sent = made.bytes_of(seat)
            assert sent["same_node"] > 0.6 * sent.total()


def test_a_worker_that_is_replaced_in_the_midst_costs_no_sample(corpus, tmp_path, monkeypatch):
    with serving(tmp_path, monkeypatch) as made:
        path = job(corpus, "replaced", epochs=3)
        submit(made, path)
        ranks = Ranks(made.address, world_size=2, job="replaced", hold_at=4).start()
        wait_for(lambda: ranks.held)
        ending = made.service.pool.replace("worker-0.1")
        asyncio.run_coroutine_threadsafe(ending, made.loop).result(60)
        ranks.release()
        ranks.join()
        assert set(made.hosts) == {"worker-0.1", "worker-0.2", "worker-1.1"}
        assert ranks.steps_done == 3 * IMAGES // 12
        # Its successor has the same disk.
        assert made.hosts["worker-0.2"].stats().samples_reused > 0
