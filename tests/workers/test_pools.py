"""One contract over both pools. Ray's tests share one small Ray a test process."""

import asyncio
import contextlib
import logging
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import grpc.aio
import numpy as np
import pytest
import ray
from dataservice_proto.v1 import worker_pb2, worker_pb2_grpc
from ray import cloudpickle

from dataservice.core.errors import ServiceError, SpecError, WorkerLostError
from dataservice.core.orders import PackKey, PackOrder, PackSample, PartSpec
from dataservice.core.ports import SampleDecoder
from dataservice.core.sample import (
    DecodedSample,
    RawSample,
    SampleLengths,
    SampleLocation,
    SampleRef,
)
from dataservice.core.tickets import holder_key, prove, sign_ticket, ticket_for
from dataservice.serving.server import serve_worker
from dataservice.serving.wire_packs import ticket_to_proto
from dataservice.serving.worker_link import GrpcWorkerLink
from dataservice.workers.host import DecodingHost
from dataservice.workers.local_pool import LocalWorkerPool
from dataservice.workers.pool import PoolConfig
from dataservice.workers.ray_pool import (
    SMALLEST_OBJECT_STORE_BYTES,
    RayPoolConfig,
    RayWorkerPool,
    remove_folder,
    start_ray,
)
from dataservice.workers.sample_pipelines import PipelineFactory
from dataservice.workers.thread_decoders import ThreadDecoders
from tests.one_order import prepared
from tests.waiting import until, wait_for
from tests.workers.served import ask, never_searched, nobody_at, serve

pytestmark = pytest.mark.long

# A test module cannot be imported by Ray's workers: send what it defines by value.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

# Often asked; but on a busy machine a worker that lives may take seconds to answer.
QUICK = {"slots_per_worker": 3, "health_interval_s": 0.1, "health_timeout_s": 30.0}


class Occupant:
    """Takes a CPU."""

    def here(self):
        pass


async def serve_but_not_the_second(worker):
    if worker.startswith("worker-1."):
        raise SpecError("port 99999 is not a port")
    return await serve(worker)


async def serve_with_a_surprise(worker):
    raise OSError("no such device")


async def serve_never(worker):
    await asyncio.sleep(3600)


@pytest.fixture(scope="module")
def whole_ray():
    """Ray's sockets need a short path, which pytest's own directories are not."""
    directory = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    init = partial(
        ray.init,
        address="local",
        num_cpus=2,
        object_store_memory=SMALLEST_OBJECT_STORE_BYTES,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        _temp_dir=directory,
    )
    start_ray(init)
    yield
    ray.shutdown()
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
def small_ray(whole_ray, monkeypatch):
    """Ray for one test, which finds no name of a worker taken."""
    monkeypatch.setattr("dataservice.workers.ray_pool.INTRODUCTION_S", 30.0)
    yield
    for each in named_actors():  # those of a test that failed
        with contextlib.suppress(ValueError):
            ray.kill(ray.get_actor(each["name"], namespace=each["namespace"]))
    wait_for(lambda: not named_actors())


def named_actors():
    return ray.util.list_named_actors(all_namespaces=True)


def local_pool(serve, **config):
    return LocalWorkerPool(serve=serve, config=PoolConfig(**QUICK, **config))


def ray_pool(serve, **config):
    config = RayPoolConfig(**{"cpus_per_worker": 0.5, **QUICK, **config})
    return RayWorkerPool(serve=serve, config=config)


@pytest.fixture
async def stopped():
    """Stop the pools that a maker makes, though the test fails: names of workers come again."""
    pools = []

    def watch(make):
        def made(*args, **config):
            pools.append(make(*args, **config))
            return pools[-1]

        return made

    yield watch
    for pool in pools:
        await pool.stop()


@pytest.fixture(
    params=["local", pytest.param("ray", marks=pytest.mark.xdist_group("ray"))],
)
def kind(request):
    if request.param == "ray":
        request.getfixturevalue("small_ray")
    return request.param


@pytest.fixture
def make_pool(kind, stopped):  # in this order: pools are stopped before Ray is looked through
    return stopped({"local": local_pool, "ray": ray_pool}[kind])


@pytest.fixture
def make_ray_pool(small_ray, stopped):
    return stopped(ray_pool)


async def test_every_worker_serves_under_its_own_name_until_the_pool_stops(make_pool):
    pool = make_pool(serve, workers=2)
    await pool.start()
    workers = pool.workers()
    assert [each.worker for each in workers] == ["worker-0.1", "worker-1.1"]
    assert [(await ask(each.address))[0] for each in workers] == ["worker-0.1", "worker-1.1"]
    assert {each.slots for each in workers} == {3}
    await pool.stop()
    assert pool.workers() == ()
    for each in workers:
        await nobody_at(each.address)


async def test_a_ray_worker_never_searches_for_cycles_in_what_it_has_loaded(make_ray_pool):
    """Ray's own objects and all modules, at each of the many searches of a step's messages."""
    pool = make_ray_pool(serve, workers=1)
    await pool.start()
    (worker,) = pool.workers()
    assert await never_searched(worker.address) > 10_000


async def test_a_replaced_tokenser_is_gone_and_its_successor_has_a_new_name(make_pool):
    pool = make_pool(serve, workers=1)
    await pool.start()
    (old,) = pool.workers()
    # Two reports of one death, and one of a worker that never was.
    await asyncio.gather(*(pool.replace(name) for name in (old.worker, old.worker, "worker-9.1")))
    (new,) = pool.workers()
    assert new.worker == "worker-0.2"
    assert (await ask(new.address))[0] == "worker-0.2"
    if new.address != old.address:
        await nobody_at(old.address)
    await pool.replace(old.worker)
    assert pool.workers() == (new,)


async def test_a_pool_serves_with_the_workers_that_start_and_says_which_do_not(make_pool, caplog):
    pool = make_pool(serve_but_not_the_second, workers=3)
    await pool.start()
    assert states(pool) == {"worker-0.1": "serving", "worker-2.1": "serving"}
    said = pool.shortfall()
    assert said.startswith("1 of 3 workers are missing and tried again every ")
    assert said.endswith("port 99999 is not a port")
    assert "serving with fewer workers than wanted: 1 of 3" in caplog.text


async def test_a_worker_that_cannot_start_fails_a_pool_that_needs_it_with_its_own_error(make_pool):
    pool = make_pool(serve_but_not_the_second, workers=2, min_workers=2)
    with pytest.raises(SpecError, match=r"1 of 2 workers serve, and min_workers is 2: .*99999"):
        await pool.start()
    assert pool.workers() == ()


async def test_workers_that_start_do_not_wait_long_for_one_that_hangs():
    hangs = asyncio.Event()

    async def serve_the_first_at_once(worker):
        if not worker.startswith("worker-0."):
            await hangs.wait()
        return await serve(worker)

    pool = local_pool(serve_the_first_at_once, workers=2, others_timeout_s=0.2)
    await pool.start()
    assert states(pool) == {"worker-0.1": "serving"}
    assert pool.shortfall() == "1 of 2 workers are being started"
    hangs.set()
    await until(lambda: len(pool.workers()) == 2)
    assert pool.shortfall() == ""
    await pool.stop()


async def test_what_is_ordered_of_a_pool_that_starts_is_not_given_to_its_first_worker_alone():
    others = asyncio.Event()

    async def serve_the_first_at_once(worker):
        if not worker.startswith("worker-0."):
            await others.wait()
        return await serve(worker)

    pool = local_pool(serve_the_first_at_once, workers=2)
    assert pool.shortfall() == "2 of 2 workers are being started"
    starting = asyncio.create_task(pool.start())
    await until(lambda: pool.shortfall() == "1 of 2 workers are being started")
    assert pool.workers() == ()
    others.set()
    await starting
    assert len(pool.workers()) == 2
    await pool.stop()


async def test_a_worker_that_ray_has_no_room_for_is_waited_for_without_the_others(
    make_ray_pool, monkeypatch
):
    """Each takes one of two CPUs, and a third actor of somebody else's has one of them."""
    monkeypatch.setattr("dataservice.workers.ray_pool.END_S", 30.0)  # for Ray to tell what is free
    other = ray.remote(num_cpus=1)(Occupant).remote()
    await other.here.remote()
    # `others_timeout_s`: the pool must not give up waiting before the worker is given up.
    pool = make_ray_pool(
        serve, workers=2, start_timeout_s=30.0, others_timeout_s=90.0, cpus_per_worker=1.0
    )
    await pool.start()
    (placed,) = pool.workers()
    assert (await ask(placed.address))[0] == placed.worker
    assert re.match(
        r"1 of 2 workers are missing and tried again every .* s: worker-[01]\.\d+ did not start "
        r"within 30 s: it takes 1 CPUs, and of 2 in the cluster 0 are free\.",
        pool.shortfall(),
    )
    ray.kill(other)
    await until(lambda: len(pool.workers()) == 2, limit_s=90)
    assert placed in pool.workers()
    assert pool.shortfall() == ""


async def test_workers_of_larger_settings_serve_as_far_as_there_is_room(make_ray_pool):
    former = kept_pool(serve, workers=3)
    await former.start()
    assert len(former.workers()) == 3
    await former.stop()
    # In two CPUs there is no room for three of one each.
    larger = make_ray_pool(
        serve,
        workers=3,
        namespace="service-a",
        settings="larger",
        cpus_per_worker=1.0,
        start_timeout_s=30.0,
        others_timeout_s=90.0,
    )
    await larger.start()
    assert len(larger.workers()) == 2
    assert larger.shortfall().startswith("1 of 3 workers are missing")


async def test_an_unexpected_error_at_start_names_the_worker(make_pool):
    pool = make_pool(serve_with_a_surprise, workers=1)
    with pytest.raises(WorkerLostError, match=r"worker-0.1 did not start.*no such device"):
        await pool.start()


async def test_a_worker_that_never_starts_is_given_up(make_pool):
    pool = make_pool(serve_never, workers=1, start_timeout_s=1.0)
    with pytest.raises(WorkerLostError, match="did not start within 1 s"):
        await pool.start()


async def test_a_seat_that_cannot_be_filled_is_tried_again():
    fails = iter([False, True, True, False])

    async def serve_sometimes(worker):
        if next(fails):
            raise OSError("no room")
        return await serve(worker)

    pool = local_pool(serve_sometimes, workers=1, longest_retry_s=0.1)
    await pool.start()
    await pool.replace("worker-0.1")
    assert pool.workers() == ()
    await until(pool.workers)
    assert pool.workers()[0].worker == "worker-0.4"
    await pool.stop()


@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_ray_worker_that_dies_or_hangs_is_noticed_and_replaced(make_ray_pool, blow):
    pool = make_ray_pool(serve, workers=2, health_timeout_s=5.0)
    await pool.start()
    first, second = pool.workers()
    _, process_id = await ask(first.address)
    os.kill(process_id, blow)
    await until(lambda: set(states(pool)) == {"worker-0.2", "worker-1.1"})
    assert pool.workers()[1].address == second.address
    assert (await ask(pool.workers()[0].address))[1] != process_id


class Drain:
    """Stands for the dispatcher: says when a worker holds nothing any more."""

    def __init__(self):
        self.asked = []
        self.over = asyncio.Event()

    async def __call__(self, worker):
        self.asked.append(worker)
        await self.over.wait()


def states(pool):
    return {each.worker: each.state for each in pool.workers()}


async def test_a_renewed_worker_serves_beside_its_successor_until_it_is_drained(make_pool):
    pool, drain = make_pool(serve, workers=2), Drain()
    await pool.start()
    old, other = pool.workers()
    renewing = asyncio.create_task(pool.renew([old.worker], drain))
    await until(lambda: drain.asked)
    assert states(pool) == {
        "worker-0.2": "serving",
        "worker-1.1": "serving",
        "worker-0.1": "draining",
    }
    assert (await ask(old.address))[0] == "worker-0.1"
    drain.over.set()
    await renewing
    assert set(states(pool)) == {"worker-0.2", "worker-1.1"}
    await nobody_at(old.address)
    assert (await ask(other.address))[0] == "worker-1.1"


async def test_workers_are_renewed_one_after_another_and_not_for_ever(make_pool):
    pool, drain = make_pool(serve, workers=2, drain_timeout_s=0.2), Drain()
    await pool.start()
    await pool.renew([each.worker for each in pool.workers()] + ["worker-9.1"], drain)
    assert drain.asked == ["worker-0.1", "worker-1.1"]
    assert set(states(pool)) == {"worker-0.2", "worker-1.2"}


async def test_where_there_is_no_room_for_a_successor_the_worker_drains_first():
    async def serve_one_at_a_time(worker):
        if pool.workers():
            raise OSError("no room")
        return await serve(worker)

    pool, drain = local_pool(serve_one_at_a_time, workers=1), Drain()
    await pool.start()
    (old,) = pool.workers()
    renewing = asyncio.create_task(pool.renew([old.worker], drain))
    await until(lambda: drain.asked)
    assert states(pool) == {"worker-0.1": "draining"}
    assert (await ask(old.address))[0] == "worker-0.1"
    drain.over.set()
    await renewing
    assert states(pool) == {"worker-0.3": "serving"}
    await pool.stop()


async def test_a_worker_that_drains_and_dies_is_gone_at_once(make_ray_pool):
    pool, drain = make_ray_pool(serve, workers=1), Drain()
    await pool.start()
    (old,) = pool.workers()
    renewing = asyncio.create_task(pool.renew([old.worker], drain))
    await until(lambda: drain.asked)
    await pool.replace(old.worker)
    assert states(pool) == {"worker-0.2": "serving"}
    drain.over.set()
    await renewing
    assert states(pool) == {"worker-0.2": "serving"}


async def test_a_worker_that_is_silent_for_a_while_is_told_apart_and_kept(make_ray_pool):
    pool = make_ray_pool(serve, workers=1, silent_after_s=0.3, health_timeout_s=60.0)
    await pool.start()
    (info,) = pool.workers()
    _, process_id = await ask(info.address)
    os.kill(process_id, signal.SIGSTOP)
    await until(lambda: states(pool) == {"worker-0.1": "silent"})
    os.kill(process_id, signal.SIGCONT)
    await until(lambda: states(pool) == {"worker-0.1": "serving"})
    assert await ask(info.address) == ("worker-0.1", process_id)


def kept_pool(serve, namespace="service-a", settings="today", outlive=True, **config):
    """A pool whose workers outlive it."""
    return ray_pool(serve, namespace=namespace, settings=settings, outlive=outlive, **config)


async def end_workers(pool, **config):
    """Stop a pool that was made from `config`, and end what outlives it: a pool that keeps nothing
    takes over and stops too."""
    await pool.stop()
    last = kept_pool(serve, **config, outlive=False)
    await last.start()
    await last.stop()


async def test_workers_outlive_their_pool_and_the_next_one_takes_them_over(small_ray):
    former = kept_pool(serve, workers=2)
    await former.start()
    serving = former.workers()
    processes = [await ask(each.address) for each in serving]
    await former.stop()
    assert former.workers() == ()
    assert [await ask(each.address) for each in serving] == processes

    # Another service in the same Ray starts its own, and leaves these alone.
    stranger = kept_pool(serve, workers=1, namespace="service-b")
    await stranger.start()
    assert states(stranger) == {"worker-0.1": "serving"}
    assert stranger.workers()[0].address not in {each.address for each in serving}
    await end_workers(stranger, workers=1, namespace="service-b")

    # The next one needs fewer.
    successor = kept_pool(serve, workers=1)
    await successor.start()
    assert successor.workers() == serving[:1]
    assert await ask(serving[0].address) == processes[0]
    await nobody_at(serving[1].address)
    await successor.replace("worker-0.1")  # it can be ended, and is watched, as one's own
    assert states(successor) == {"worker-0.2": "serving"}
    await end_workers(successor, workers=1)


async def test_workers_of_other_settings_or_that_do_not_answer_are_replaced(small_ray, monkeypatch):
    # The one that is stopped lets it pass; the other must not.
    monkeypatch.setattr("dataservice.workers.ray_pool.INTRODUCTION_S", 10.0)
    former = kept_pool(serve, workers=2)
    await former.start()
    stopped = (await ask(former.workers()[0].address))[1]
    await former.stop()
    os.kill(stopped, signal.SIGSTOP)
    same = kept_pool(serve, workers=2)
    await same.start()
    assert states(same) == {"worker-1.1": "serving"}  # a successor does not wait for the other
    await until(lambda: states(same) == {"worker-0.2": "serving", "worker-1.1": "serving"})
    await same.stop()
    other = kept_pool(serve, workers=2, settings="tomorrow")
    await other.start()
    assert [each.worker for each in other.workers()] == ["worker-0.3", "worker-1.2"]
    await until(lambda: not Path(f"/proc/{stopped}").exists())
    await end_workers(other, workers=2, settings="tomorrow")


async def test_a_worker_that_nobody_asks_after_ends_itself(small_ray):
    pool = kept_pool(serve, workers=1, orphan_after_s=4.0)
    await pool.start()
    (info,) = pool.workers()
    await asyncio.sleep(6.0)
    _, process_id = await ask(info.address)  # it is asked after
    await pool.stop()
    await until(lambda: not Path(f"/proc/{process_id}").exists())
    successor = kept_pool(serve, workers=1)
    await successor.start()
    assert states(successor) == {"worker-0.1": "serving"}
    await end_workers(successor, workers=1)


async def test_a_pool_that_keeps_nothing_ends_what_it_took_over(small_ray):
    former = kept_pool(serve, workers=1)
    await former.start()
    (info,) = former.workers()
    await former.stop()
    last = kept_pool(serve, workers=1, outlive=False)
    await last.start()
    assert last.workers() == (info,)
    await last.stop()
    await nobody_at(info.address)


class Counting(SampleDecoder):
    """A pipeline that needs no files."""

    pad_token_id = 0

    def read(self, ref):
        return RawSample(key=ref.key, record={"id": ref.sample_id})

    def decode(self, raw, planned, epoch=None, places=()):
        ids = np.full(planned.llm_tokens, raw.record["id"], dtype=np.int32)
        return DecodedSample(input_ids=ids, labels=ids)


async def serve_packs(worker, *, secret):
    factory = PipelineFactory(reader_for=lambda _: Counting(), decoder_for=lambda _: Counting())
    host = DecodingHost(ThreadDecoders(factory, slots=1))
    return await serve_worker(
        host, worker=worker, listen="127.0.0.1:0", secret=secret, on_stopped=host.close
    )


async def test_ray_workers_decode_and_stream_packs_over_grpc(make_ray_pool):
    pool = make_ray_pool(partial(serve_packs, secret=b"s"), workers=2)
    await pool.start()
    link = GrpcWorkerLink(b"s")
    for info in pool.workers():
        key = PackKey(job="j", step=0, plan_digest="d", pack=1)
        sample = PackSample(
            ref=SampleRef(sample_id=5, source="s", key="k", location=SampleLocation(file="f")),
            lengths=SampleLengths(llm_tokens=3, loss_tokens=3),
        )
        receipt = await prepared(
            link, info, PackOrder(key=key, degree=1, pipeline="{}", samples=(sample,))
        )
        assert receipt.bad_samples == ()
        parts = {info.worker: (PartSpec(key=key, cp_rank=0),)}
        ticket = ticket_for(parts, rank=0, holder="h", expires_unix_s=2**40)
        signed = sign_ticket(ticket, b"s")
        request = worker_pb2.FetchRequest(
            ticket=ticket_to_proto(signed), proof=prove(signed, info.worker, holder_key("h", b"s"))
        )
        async with grpc.aio.insecure_channel(info.address) as channel:
            header, data = [c async for c in worker_pb2_grpc.WorkerStub(channel).Fetch(request)]
        assert header.header.tensors[0].name == "input_ids"
        assert np.frombuffer(data.data, "<i4")[:3].tolist() == [5, 5, 5]
    await link.close()


OWN_RAY = """
import asyncio, os, signal, stat
from pathlib import Path
import grpc, ray
from dataservice.core.whereabouts import ANYWHERE
from dataservice.workers.ray_pool import RayPoolConfig, RayWorkerPool

class Served:
    address = "127.0.0.1:1"
    where = ANYWHERE
    async def stop(self): pass

async def serve(worker):
    return Served()

async def main():
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, lambda: None)
    mine = signal.getsignal(signal.SIGTERM)
    config = RayPoolConfig(workers=3, log_to_driver=False)
    pool = RayWorkerPool(serve=serve, config=config)
    await pool.start()
    assert len(pool.workers()) == 3, "more workers than this machine may have CPUs"
    assert signal.getsignal(signal.SIGTERM) is mine, "Ray took SIGTERM"
    (private,) = Path(os.environ["TMPDIR"]).glob("dataservice-*")
    assert stat.S_IMODE(private.stat().st_mode) == 0o700, "others may reach Ray's sockets"
    assert list(private.glob("ray/session_*/sockets/raylet"))
    address = ray.get_runtime_context().gcs_address
    nodes = grpc.insecure_channel(address).unary_unary("/ray.rpc.NodeInfoGcsService/GetAllNodeInfo")
    token = os.environ["RAY_AUTH_TOKEN"]
    assert nodes(b"", metadata=[("authorization", f"Bearer {token}")])
    for metadata in ([], [("authorization", f"Bearer {token[::-1]}")]):
        try:
            nodes(b"", metadata=metadata)
        except grpc.RpcError as error:
            assert error.code() is grpc.StatusCode.UNAUTHENTICATED, error
        else:
            raise AssertionError("a stranger is let into our Ray")
    await pool.stop()
    assert not ray.is_initialized(), "the pool left its Ray running"
    assert not private.exists()

asyncio.run(main())
"""


def test_a_pool_without_an_address_runs_a_ray_that_no_stranger_gets_into_and_ends_it():
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as directory:
        done = subprocess.run(
            [sys.executable, "-c", OWN_RAY],
            capture_output=True,
            text=True,
            timeout=120,
            env={**os.environ, "TMPDIR": directory},
        )
        assert done.returncode == 0, done.stderr


def test_ray_s_folder_goes_though_a_last_line_is_written_meanwhile(tmp_path, monkeypatch):
    home = tmp_path / "dataservice-x"
    home.mkdir()
    remove, tries = shutil.rmtree, []

    def remove_while_ray_writes(folder, **options):
        remove(folder, **options)
        if not tries:
            folder.mkdir()
            (folder / "raylet.out").write_text("bye")
        tries.append(folder)

    monkeypatch.setattr(shutil, "rmtree", remove_while_ray_writes)
    remove_folder(home)
    assert len(tries) == 2
    assert not home.exists()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"workers": 0}, "workers is 0"),
        ({"workers": 1, "slots_per_worker": 0}, "slots_per_worker is 0"),
        ({"workers": 1, "min_workers": 2}, "min_workers is 2, and there are 1 workers"),
        ({"workers": 1, "cpus_per_worker": -1}, "cpus_per_worker is -1"),
        ({"workers": 1, "outlive": True}, "need a namespace"),
        ({"workers": 1, "temp_dir": Path("/" + "x" * 60)}, "at most 45"),
        (
            {"workers": 1, "runtime_env": {"py_module": []}},
            r"it has \['py_module'\], and Ray .* has",
        ),
        (
            {"workers": 1, "runtime_env": {"py_modules": ["/nowhere"]}},
            "/nowhere is not a valid path",
        ),
    ],
)
def test_an_impossible_pool_is_refused(config, message):
    with pytest.raises(SpecError, match=message):
        RayPoolConfig(**config)


def test_a_ray_whose_processes_do_not_come_up_is_started_once_more(caplog):
    tried = []

    def start(*failures):
        tried.append(len(tried))
        if len(tried) <= len(failures):
            raise failures[len(tried) - 1]
        return "here"

    slow = Exception("The current node timed out during startup.")
    assert start_ray(partial(start, slow)) == "here"
    assert len(tried) == 2
    assert "started once more: The current node timed out" in caplog.text
    tried.clear()
    with pytest.raises(Exception, match="timed out"):
        start_ray(partial(start, slow, slow, slow))
    assert len(tried) == 2
    tried.clear()
    with pytest.raises(ConnectionError):  # which a second try would not mend
        start_ray(partial(start, ConnectionError("nobody listens")))
    assert len(tried) == 1


async def test_a_ray_where_nobody_listens_is_waited_for_and_then_said_so(monkeypatch, caplog):
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr("dataservice.workers.ray_pool.SLOW_S", 0.2)
    with socket.socket() as bound:  # and does not listen
        bound.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{bound.getsockname()[1]}"
        config = RayPoolConfig(workers=1, address=address, start_timeout_s=1.0)
        pool = RayWorkerPool(serve=serve, config=config)
        starting = asyncio.create_task(pool.start())
        waits = f"1 of 1 workers wait for Ray at {address}, which has not answered for"
        await until(lambda: pool.shortfall().startswith(waits))
        with pytest.raises(WorkerLostError, match=r"not answered for 1 s: .*Connect call failed"):
            await starting
    assert waits in caplog.text


async def test_the_loss_of_rays_head_is_said_before_ray_ends_the_process(
    small_ray, stopped, monkeypatch, caplog
):
    """The head is a socket here: whoever loses Ray's own is ended by it."""
    joined = iter([False])  # as the pool asks first
    monkeypatch.setattr(ray, "is_initialized", lambda: next(joined, True))
    for name in ("init", "shutdown"):
        monkeypatch.setattr(ray, name, lambda **_: None)
    head = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    host, port = head.sockets[0].getsockname()
    pool = stopped(ray_pool)(serve, workers=1, address=f"{host}:{port}")
    async with head:
        await pool.start()
        assert pool.shortfall() == ""
    lost = f"the head of Ray at {host}:{port} does not answer any more"
    await until(lambda: pool.shortfall().startswith(lost) and lost in caplog.text)
    assert len(pool.workers()) == 1
    async with await asyncio.start_server(lambda reader, writer: writer.close(), host, port):
        await until(lambda: pool.shortfall() == "")


async def test_what_listens_and_is_no_ray_of_ours_is_said_so(monkeypatch):
    def refuse(**options):
        raise ConnectionError("it speaks another version")

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", refuse)
    other = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    async with other:
        host, port = other.sockets[0].getsockname()
        config = RayPoolConfig(workers=1, address=f"{host}:{port}")
        with pytest.raises(ServiceError, match=f"at {host}:{port} cannot be used: it speaks ano"):
            await RayWorkerPool(serve=serve, config=config).start()
