"""Decoders in processes of their own, killed, hung and starved for real."""

import asyncio
import contextlib
import gc
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from dataservice.core.errors import SpecError, WorkerLostError
from dataservice.workers.decoder_messages import Answer, Kind, ProtocolError
from dataservice.workers.decoder_process import DecoderProgram
from dataservice.workers.host import DecodingHost
from dataservice.workers.nursery import Nursery, NurseryProcess
from dataservice.workers.process_decoders import TRIES, ProcessDecoders, outcome_of
from dataservice.workers.recycled_memory import KEPT_BYTES, ReadMemory
from dataservice.workers.sample_pipelines import PipelineFactory
from tests.waiting import wait_for
from tests.workers.trouble import FACTORY, a_sample, an_order, decode, open_gate, pipeline_in

LIMIT_S = 60.0


@contextlib.contextmanager
def decoding(slots=1, timeout_s=30.0, memory_bytes=None, factory=FACTORY):
    decoders = ProcessDecoders(factory, slots=slots, timeout_s=timeout_s, memory_bytes=memory_bytes)
    decoders.start()
    with contextlib.closing(decoders):
        yield decoders


@pytest.fixture(scope="module")
def one():
    """One slot, shared by tests that leave it whole."""
    with decoding() as decoders:
        yield decoders


@pytest.fixture
def pipeline(tmp_path):
    return pipeline_in(tmp_path)


def process_that_is_at(folder, key):
    """The process that has begun to decode this sample."""
    (mark,) = wait_for(lambda: [*folder.glob(f"{key}.[0-9]*")], LIMIT_S)
    return int(mark.suffix[1:])


def living(folder, key):
    """The processes that have begun to decode this sample and live."""
    marks = folder.glob(f"{key}.[0-9]*")
    return [number for mark in marks if lives(number := int(mark.suffix[1:]))]


def lives(process_id):
    try:
        state = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


# ---- what dies and hangs ------------------------------------------------------------------


def test_a_pipeline_that_kills_who_builds_it_is_refused(one, tmp_path):
    with pytest.raises(SpecError, match=r"cannot be built.*SIGSEGV.*last of 2 tries"):
        one.open(pipeline_in(tmp_path, deadly=True))


@pytest.mark.parametrize(
    ("key", "reason"),
    [
        ("segv", "died of SIGSEGV"),
        ("abort", "died of SIGABRT"),
        ("realtime", "died of signal 40"),
        ("exit", "ended by itself with status 3"),
    ],
)
def test_a_sample_that_kills_its_process_is_masked_alone(one, pipeline, tmp_path, key, reason):
    outcomes = decode(one, pipeline, "good-1", key, "good-2", "good-3")
    assert [outcome.sample is None for outcome in outcomes] == [False, True, False, False]
    assert reason in outcomes[1].reason
    assert "last of 2 tries" in outcomes[1].reason
    assert len([*tmp_path.glob(f"{key}.*")]) == 2, "it had a second chance, in another process"
    assert len([*tmp_path.glob("good-1.*")]) == 1, "what was done is not done again"


def test_a_sample_that_kills_its_process_before_its_turn_is_masked_alone(one, pipeline, tmp_path):
    """Those of an order are tokenised together: which of them did it, each alone tells."""
    outcomes = decode(one, pipeline, "good-1", "good-2", "begin-segv", "good-3")
    assert [outcome.sample is None for outcome in outcomes] == [False, False, True, False]
    assert "died of SIGSEGV, at the last of 2 tries" in outcomes[2].reason
    assert len([*tmp_path.glob("begin-segv.*")]) == 3
    assert len([*tmp_path.glob("good-[123].*")]) == 3, "each was decoded once"


def test_a_sample_that_hangs_before_its_turn_costs_no_other(tmp_path):
    with decoding(timeout_s=3.0) as decoders:
        outcomes = decode(decoders, pipeline_in(tmp_path), "good-1", "begin-hang", "good-2")
    assert [outcome.sample is None for outcome in outcomes] == [False, True, False]
    assert "longer than decode_timeout_s, 3 s" in outcomes[1].reason


def test_a_process_that_dies_once_costs_no_sample(one, pipeline, tmp_path):
    outcomes = decode(one, pipeline, "good-1", "once", "good-2")
    assert [outcome.reason for outcome in outcomes] == ["", "", ""]
    assert len([*tmp_path.glob("once.[0-9]*")]) == 2


@pytest.mark.parametrize("key", ["hang", "spin"])
def test_a_sample_that_hangs_is_ended_at_the_limit_and_not_tried_again(tmp_path, key):
    # The others have as long: a busy machine must not take it from them.
    with decoding(timeout_s=3.0) as decoders:
        outcomes = decode(decoders, pipeline_in(tmp_path), "good-1", key, "good-2")
        assert [outcome.sample is None for outcome in outcomes] == [False, True, False]
        assert "longer than decode_timeout_s, 3 s" in outcomes[1].reason
        assert outcomes[1].seconds >= 3.0
        assert not lives(process_that_is_at(tmp_path, key))


def test_a_sample_beyond_the_memory_limit_is_masked_and_its_process_lives_on(tmp_path):
    with decoding(memory_bytes=2**30) as decoders:
        outcomes = decode(decoders, pipeline_in(tmp_path), "good-1", "hog", "good-2", images=1)
    assert [outcome.sample is None for outcome in outcomes] == [False, True, False]
    assert "decode_memory_bytes" in outcomes[1].reason
    assert process_that_is_at(tmp_path, "good-1") == process_that_is_at(tmp_path, "good-2")


@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP])
def test_a_decoder_struck_from_outside_loses_nothing(tmp_path, blow):
    with decoding(timeout_s=4.0) as decoders, ThreadPoolExecutor(1) as caller:
        call = caller.submit(decode, decoders, pipeline_in(tmp_path), "good", "gate", "good")
        struck = process_that_is_at(tmp_path, "gate")
        os.kill(struck, blow)
        open_gate(tmp_path)
        assert [outcome.reason for outcome in call.result(LIMIT_S)] == ["", "", ""]
        assert not lives(struck)


def test_a_decoder_may_be_killed_from_outside_more_often_than_it_may_die(tmp_path):
    with decoding() as decoders, ThreadPoolExecutor(1) as caller:
        call = caller.submit(decode, decoders, pipeline_in(tmp_path), "gate")
        for _ in range(TRIES + 1):
            (struck,) = wait_for(lambda: living(tmp_path, "gate"), LIMIT_S)
            os.kill(struck, signal.SIGKILL)
            wait_for(lambda gone=struck: not lives(gone))
        open_gate(tmp_path)
        assert call.result(LIMIT_S)[0].reason == ""


def test_a_decoder_that_dies_idle_is_replaced_before_its_next_sample(one, pipeline, tmp_path):
    decode(one, pipeline, "good-1")
    idle = process_that_is_at(tmp_path, "good-1")
    os.kill(idle, signal.SIGKILL)
    wait_for(lambda: not lives(idle))
    # A first death would leave this sample only one more chance, which it uses up.
    (outcome,) = decode(one, pipeline, "once")
    assert outcome.reason == ""


def test_a_nursery_that_dies_is_started_anew(tmp_path):
    with decoding(slots=2) as decoders, ThreadPoolExecutor(1) as caller:
        call = caller.submit(decode, decoders, pipeline_in(tmp_path), "gate", "good")
        decoder = process_that_is_at(tmp_path, "gate")
        nursery = parent_of(decoder)
        os.kill(nursery, signal.SIGKILL)
        # The kernel ends the decoder with it; one that is let go first would hand its sample over.
        wait_for(lambda: not lives(decoder))
        open_gate(tmp_path)
        assert [outcome.reason for outcome in call.result(LIMIT_S)] == ["", ""]
        assert not lives(decoder)
        assert decode(decoders, pipeline_in(tmp_path), "good")[0].reason == ""


@pytest.mark.long
def test_no_sample_answers_for_a_nursery_that_dies_under_it(tmp_path):
    """However many samples it takes along, and again and again."""
    with decoding(slots=2) as decoders, ThreadPoolExecutor(2) as caller:
        folders = [tmp_path / "one", tmp_path / "two"]
        for folder in folders:
            folder.mkdir()
        calls = [caller.submit(decode, decoders, pipeline_in(folder), "gate") for folder in folders]
        for deaths in range(TRIES + 1):
            at_work = [
                wait_for(lambda f=folder: living(f, "gate"), LIMIT_S)[0] for folder in folders
            ]
            nursery = parent_of(at_work[0])
            assert parent_of(at_work[1]) == nursery, f"one nursery has both, {deaths} deaths on"
            os.kill(nursery, signal.SIGKILL)
            wait_for(lambda gone=at_work: not any(map(lives, gone)))
        for folder in folders:
            open_gate(folder)
        assert [call.result(LIMIT_S)[0].reason for call in calls] == ["", ""]


@pytest.mark.long
def test_a_sample_is_given_up_whose_nurseries_die_again_and_again(tmp_path):
    with decoding() as decoders, ThreadPoolExecutor(1) as caller:
        call = caller.submit(decode, decoders, pipeline_in(tmp_path), "gate")
        while not call.done():
            for process_id in living(tmp_path, "gate"):
                with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                    os.kill(parent_of(process_id), signal.SIGKILL)
        assert "ended with the process that forks decoders, at the last" in call.result()[0].reason


def test_what_a_gone_nursery_forked_is_ended_without_harm_to_the_next():
    nursery = Nursery(DecoderProgram(FACTORY), name="decoder")
    first, second = nursery.fork(), nursery.fork()
    os.kill(parent_of(first.process_id), signal.SIGKILL)
    nursery.end(first)
    heir, other = nursery.fork(), nursery.fork()
    nursery.end(second)
    assert not heir.ended
    endings = [nursery.end(child) for child in (heir, other)]
    assert all("died of SIGKILL" in ending for ending in endings), "its nursery saw them end"
    orphaned = [child.orphaned for child in (first, second, heir, other)]
    assert orphaned == [True, True, False, False]
    nursery.close()


def test_owners_share_one_nursery_and_each_ends_what_is_its_own():
    process = NurseryProcess()
    one, other = (
        Nursery(DecoderProgram(FACTORY), name=name, process=process) for name in ("one", "other")
    )
    mine, yours, ended = one.fork(), other.fork(), other.fork()
    assert {parent_of(child.process_id) for child in (mine, yours, ended)} == {process.program.pid}
    wait_for(lambda: process_name(mine) == "one")  # each sets its own, after it was forked
    wait_for(lambda: process_name(yours) == "other")
    ended.kill()
    assert "died of SIGKILL" in other.end(ended)
    one.close()
    wait_for(lambda: mine.ended)
    with pytest.raises(WorkerLostError, match="stopped"):
        one.fork()
    assert not yours.ended
    assert not yours.orphaned
    program = process.program
    os.kill(program.pid, signal.SIGKILL)
    heir = other.fork()
    assert process.program is not program
    assert "was killed" in other.end(yours)
    assert not heir.ended
    other.close()
    wait_for(lambda: heir.ended)
    assert process.program is None
    for owner, child in ((one, mine), (other, heir)):
        owner.end(child)


@pytest.fixture
def fleeting(tmp_path, monkeypatch):
    """A function whose module no other process finds."""
    module = tmp_path / "fleeting.py"
    module.write_text("def make(pipeline): ...")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "fleeting", raising=False)
    import fleeting

    module.unlink()
    return fleeting.make


def test_an_owner_that_cannot_be_loaded_leaves_the_others_alone(fleeting):
    process = NurseryProcess()
    good = Nursery(DecoderProgram(FACTORY), name="good", process=process)
    bad = Nursery(fleeting, name="bad", process=process)
    child = good.fork()
    with pytest.raises(WorkerLostError, match=r"bad processes cannot start: ModuleNotFoundError"):
        bad.start()
    bad.close()
    assert not child.ended
    assert "died of SIGKILL" in good.end(child)
    good.close()


def process_name(child):
    return Path(f"/proc/{child.process_id}/comm").read_text().strip()


def test_a_factory_that_a_fresh_process_cannot_import_is_said_so(fleeting):
    factory = PipelineFactory(reader_for=fleeting, decoder_for=fleeting)
    decoders = ProcessDecoders(factory, slots=1)
    with pytest.raises(WorkerLostError, match=r"cannot start: ModuleNotFoundError.*fleeting"):
        decoders.start()
    decoders.close()


# ---- all together -------------------------------------------------------------------------


def parent_of(process_id):
    return int(Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.long
async def test_of_300_samples_exactly_the_killers_are_masked(tmp_path):
    killers = {17: "segv", 80: "exit", 81: "hang", 160: "abort", 299: "spin"}
    keys = [killers.get(number, f"good-{number}") for number in range(300)]
    host = DecodingHost(ProcessDecoders(FACTORY, slots=2, timeout_s=4.0))
    await host.start()
    bad = []
    for pack in range(10):
        mine = keys[30 * pack : 30 * pack + 30]
        order = an_order(tmp_path, mine, pack=pack, first=30 * pack, images=pack % 2)
        receipt = await host.prepare(order)
        bad += [each.sample_id for each in receipt.bad_samples]
        part = await host.sequence(order.key, 0)
        wanted = [n if n not in killers else 9 for n in range(30 * pack, 30 * pack + 30)]
        assert part["input_ids"][::4].tolist() == wanted
    host.close()
    assert bad == sorted(killers)
    twice = Counter(path.name.partition(".")[0] for path in tmp_path.glob("good-*"))
    assert set(twice.values()) == {1}


def descriptors_and_mappings():
    maps = Path("/proc/self/maps").read_text()
    return len(os.listdir("/proc/self/fd")), maps.count("memfd:")


def mapped_bytes():
    ranges = (line.split()[0] for line in Path("/proc/self/maps").read_text().splitlines()
              if "memfd:sample" in line)  # fmt: skip
    return sum(int(end, 16) - int(start, 16) for start, end in (r.split("-") for r in ranges))


def test_memory_of_an_answer_whose_times_make_no_sense_is_closed():
    file, planned = os.memfd_create("sample"), a_sample(1, "k").lengths
    answer = Answer(kind=Kind.NEW, payload=b"1", read_s=-1.0, descriptor=file)
    with pytest.raises(ProtocolError):
        outcome_of(answer, planned, ReadMemory(), seconds=1.0)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(file)


async def test_what_was_released_leaves_no_descriptor_and_little_memory(tmp_path):
    host = DecodingHost(ProcessDecoders(FACTORY, slots=2))
    await host.start()
    gc.collect()  # what other tests left behind is theirs
    mapped_before = mapped_bytes()
    await host.prepare(an_order(tmp_path, ["good"], images=1))
    before, _ = descriptors_and_mappings()

    def few_descriptors():
        return descriptors_and_mappings()[0] <= before + 2

    for pack in range(1, 200):
        order = an_order(tmp_path, ["good", "once-" + str(pack % 50)], pack=pack, images=1)
        await host.prepare(order)
    await asyncio.to_thread(wait_for, few_descriptors)  # a slot may still be at its last process
    assert descriptors_and_mappings()[1] >= 2 * 199
    host.release([an_order(tmp_path, [], pack=pack).key for pack in range(200)])
    for pack in range(200, 204):  # each slot hears of it with its next order
        await host.prepare(an_order(tmp_path, ["good"] * 4, pack=pack, images=1))
    most = mapped_before + 2 * KEPT_BYTES + 8 * 2**20
    await asyncio.to_thread(wait_for, lambda: mapped_bytes() <= most)
    await asyncio.to_thread(wait_for, few_descriptors)
    host.close()


WORKER = """
import asyncio, os, socket, sys, threading
from pathlib import Path
from dataservice.workers.decoder_messages import Answer, Kind, ProtocolError
from dataservice.workers.host import DecodingHost
from dataservice.workers.decoder_process import DecoderProgram
from dataservice.workers.nursery import Nursery
from dataservice.workers.process_decoders import TRIES, ProcessDecoders, outcome_of
from dataservice.workers.recycled_memory import ReadMemory
from tests.workers.trouble import FACTORY, an_order

async def main():
    port = socket.create_server(("127.0.0.1", 0))
    os.set_inheritable(port.fileno(), True)
    host = DecodingHost(ProcessDecoders(FACTORY, slots=2))
    await host.start()
    folder = Path(sys.argv[1])
    (folder / "worker.port").write_text(str(port.getsockname()[1]))
    await host.prepare(an_order(folder, ["good", "spin", "hang"]))

asyncio.run(main())
"""


def sockets_of(process_id):
    held = 0
    for each in Path(f"/proc/{process_id}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # a mark that has just been closed
            held += os.readlink(each).startswith("socket:")
    return held


@pytest.mark.parametrize("busy", [True, False])
def test_decoders_end_with_a_worker_that_is_killed_and_never_hold_its_port(tmp_path, busy):
    with subprocess.Popen([sys.executable, "-c", WORKER, str(tmp_path)]) as worker:
        spinning = process_that_is_at(tmp_path, "spin")
        sleeping = process_that_is_at(tmp_path, "hang")
        nursery = parent_of(spinning)
        if not busy:
            os.kill(nursery, signal.SIGSTOP)
        for process_id in (nursery, spinning, sleeping):
            assert sockets_of(process_id) == 1
        worker.kill()
    wait_for(lambda: not any(map(lives, (nursery, spinning, sleeping))))


def test_a_signal_to_the_whole_group_leaves_decoders_at_work(tmp_path):
    with decoding() as decoders, ThreadPoolExecutor(1) as caller:
        call = caller.submit(decode, decoders, pipeline_in(tmp_path), "gate")
        decoder = process_that_is_at(tmp_path, "gate")
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(decoder, number)
            os.kill(parent_of(decoder), number)
        open_gate(tmp_path)
        assert call.result(LIMIT_S)[0].reason == ""
        assert len([*tmp_path.glob("gate.*")]) == 1


def test_a_process_that_ran_one_teams_code_decodes_for_no_other(tmp_path):
    factory = replace(FACTORY, code_owner=owner_in)
    served: dict[str | None, set[int]] = {None: set(), "a": set(), "b": set()}
    with decoding(slots=2, factory=factory) as decoders:
        for team in (None, "a", "b", None, "a", "a", "b"):
            (outcome,) = decode(decoders, pipeline_in(tmp_path, code_of=team), "take-0.01")
            assert outcome.reason == ""
            served[team].add(process_that_was_at(tmp_path))
    assert not served["a"] & served["b"]
    assert not served[None] & (served["a"] | served["b"])


def test_a_team_finds_its_process_again_and_another_slot_is_left_alone(tmp_path):
    factory = replace(FACTORY, code_owner=owner_in)
    with decoding(slots=2, factory=factory) as decoders:
        decode(decoders, pipeline_in(tmp_path, code_of="a"), "take-0.01")
        of_a = process_that_was_at(tmp_path)
        decode(decoders, pipeline_in(tmp_path), "take-0.01")
        assert process_that_was_at(tmp_path) != of_a
        decode(decoders, pipeline_in(tmp_path, code_of="a"), "take-0.01")
        assert process_that_was_at(tmp_path) == of_a
        assert lives(of_a)


def owner_in(pipeline):
    return json.loads(pipeline).get("code_of")


def process_that_was_at(folder):
    """The process of the one sample that was decoded since the last call."""
    (mark,) = folder.glob("take-*")
    mark.unlink()
    return int(mark.suffix[1:])


def test_closing_ends_every_process_and_whoever_waits(tmp_path):
    with decoding(slots=2) as decoders, ThreadPoolExecutor(1) as caller:
        call = caller.submit(decode, decoders, pipeline_in(tmp_path), "hang")
        decoder = process_that_is_at(tmp_path, "hang")
        nursery = parent_of(decoder)
        decoders.close()
        with pytest.raises(WorkerLostError, match="stopped"):
            call.result(LIMIT_S)
        wait_for(lambda: not lives(decoder) and not lives(nursery))


def test_the_nursery_has_one_thread_and_loads_neither_grpc_nor_ray(tmp_path):
    """Forking is sound only where no other thread may hold a lock."""
    from dataservice.jobs.sample_pipeline import decoder_of, reader_of

    factory = PipelineFactory(reader_for=reader_of, decoder_for=decoder_of)
    with decoding(factory=factory) as decoders:
        nursery = parent_of(decoders.process_ids[0])
        threads = [
            (task / "comm").read_text().strip() for task in Path(f"/proc/{nursery}/task").iterdir()
        ]
        loaded = Path(f"/proc/{nursery}/maps").read_text()
    assert set(threads) <= {"nursery", "jemalloc_bg_thd"}
    assert "av" in loaded
    assert not any(library in loaded for library in ("cygrpc", "_raylet"))


STOPPED = """
import sys, time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from dataservice.workers.decoder_process import DecoderProgram
from dataservice.workers.nursery import Nursery
from dataservice.workers.process_decoders import TRIES, ProcessDecoders, outcome_of
from dataservice.workers.recycled_memory import ReadMemory
from tests.workers.trouble import FACTORY, a_sample, pipeline_in

folder = Path(sys.argv[1])
decoders = ProcessDecoders(FACTORY, slots=1, timeout_s=3.0)
decoders.start()
(outcome,) = decoders.decode(pipeline_in(folder), [a_sample(1, "gate")])
(folder / "reason").write_text(outcome.reason or "none")
decoders.close()
"""


def test_a_worker_that_is_stopped_with_its_decoders_blames_no_sample_for_it(tmp_path):
    """As when a node is frozen: time goes on, and nobody is at fault."""
    with subprocess.Popen([sys.executable, "-c", STOPPED, str(tmp_path)]) as worker:
        family = [process_that_is_at(tmp_path, "gate"), worker.pid]
        for process_id in family:
            os.kill(process_id, signal.SIGSTOP)
        time.sleep(4.0)  # longer than the limit
        for process_id in reversed(family):
            os.kill(process_id, signal.SIGCONT)
        open_gate(tmp_path)
        assert worker.wait(LIMIT_S) == 0
    assert (tmp_path / "reason").read_text() == "none"
    assert len([*tmp_path.glob("gate.*")]) == 1


@pytest.fixture
def endless(tmp_path, monkeypatch):
    """A function whose module a nursery loads for ever."""
    (tmp_path / "endless.py").write_text(
        "import os, time\n"
        "if mark := os.environ.get('LOADS_FOR_EVER'):\n"
        "    open(mark, 'w').close()\n"
        "    time.sleep(3600)\n"
        "def make(pipeline): ...\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "endless", raising=False)
    import endless

    monkeypatch.setenv("LOADS_FOR_EVER", str(tmp_path / "loading"))
    return endless.make


def test_closing_gives_up_a_nursery_that_hangs_while_it_loads(tmp_path, endless):
    factory = PipelineFactory(reader_for=endless, decoder_for=endless)
    decoders = ProcessDecoders(factory, slots=1)
    with ThreadPoolExecutor(1) as starter:
        call = starter.submit(decoders.start)
        wait_for((tmp_path / "loading").exists)
        decoders.close()
        with pytest.raises(WorkerLostError, match="stopped"):
            call.result(LIMIT_S)


def test_closing_does_not_wait_for_what_another_owner_has_loaded(tmp_path, endless):
    process = NurseryProcess()
    quick = Nursery(DecoderProgram(FACTORY), name="quick", process=process)
    slow = Nursery(endless, name="slow", process=process)
    child = quick.fork()
    with ThreadPoolExecutor(1) as starter:
        call = starter.submit(slow.start)
        wait_for((tmp_path / "loading").exists)
        quick.close()
        wait_for(lambda: child.ended)
        assert not call.done()
        assert process.program is not None
        slow.refuse()
        with pytest.raises(WorkerLostError, match="stopped"):
            call.result(LIMIT_S)
    slow.close()
    assert process.program is None
    quick.end(child)


def test_decoders_that_are_closed_before_they_start_start_nothing():
    decoders = ProcessDecoders(FACTORY, slots=1)
    decoders.close()
    with pytest.raises(WorkerLostError, match="stopped"):
        decoders.start()
    assert decoders.process_ids == []


# ---- what the seconds go to -----------------------------------------------------------------


def test_waiting_for_storage_and_for_a_cpu_is_told_from_work(one, pipeline):
    # A second each: this process counts from the answer before, which it may be late to read.
    far, idle, busy = decode(one, pipeline, "far-1", "take-1", "work-1")
    assert far.read_s > 0.35 > far.read_cpu_s + 0.1
    assert far.read_cpu_s <= far.cpu_s < 0.25
    assert idle.seconds - idle.read_s > 0.35 > idle.cpu_s + 0.1
    assert busy.cpu_s - busy.read_cpu_s > 0.35
    for each in (far, idle, busy):
        assert 0 <= each.read_cpu_s <= each.cpu_s <= each.seconds
