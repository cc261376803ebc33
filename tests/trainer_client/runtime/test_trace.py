"""A traced step is a file that Perfetto reads: nested phases without gaps, waits, copies, rings."""

import json
from collections import defaultdict
from itertools import pairwise
from weakref import ref

import pytest
import torch

from tests.trainer_client.runtime.random_chunks import HIDDEN, cut
from tests.trainer_client.runtime.random_steps import (
    LAYERS,
    make_model,
    make_shard,
    random_plan,
    random_samples,
)
from trainer_client.device import DeviceCopier, PlainQueue
from trainer_client.runtime import GroupPool, PeerGroup, join_traces, run_step, traced
from trainer_client.runtime.peers import Transfer
from trainer_client.runtime.pipeline_mesh import PipelineMesh
from trainer_client.runtime.pipeline_parallel import run_pipeline_step
from trainer_client.runtime.plain_kernel import PlainKernel
from trainer_client.runtime.trace import COPIES, STEPS, WAITS

CPU = torch.device("cpu")


def steps(rank, size, folder):
    samples = random_samples(6)
    model = make_model(())
    copier = DeviceCopier(CPU, queue=PlainQueue(CPU))
    with GroupPool(timeout_s=60) as pool:
        with traced() as trace:
            results = []
            for seed in (6, 7):
                waves = random_plan(samples, size, (2, 3), seed)
                shard = make_shard(samples, waves, size, rank, seed, f"{seed:064}")
                results.append(run_step(model, copier.send(shard), pool))
        run_step(model, shard, pool)  # outside of the trace
        phases = [dict(result.phase_s) for result in results]
    trace.write(f"{folder}/rank{rank}.json")
    return phases, len(shard.microbatches)


@pytest.fixture(scope="module")
def traces(tmp_path_factory):
    from tests.trainer_client.runtime.conftest import run_world

    folder = tmp_path_factory.mktemp("traces")
    return folder, run_world(steps, 3, folder, str(folder))


def events_of(folder, rank):
    return json.loads((folder / f"rank{rank}.json").read_text())["traceEvents"]


def by_track(events):
    tracks = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            tracks[event["tid"]].append(event)
    return tracks


def end(event):
    return event["ts"] + event["dur"]


def test_times_are_whole_so_that_no_reader_cuts_a_span_out_of_the_one_around_it(traces):
    folder, answers = traces
    for rank in answers:
        for event in events_of(folder, rank):
            assert all(type(event[name]) is int for name in ("ts", "dur") if name in event)


def test_spans_of_a_track_are_nested_or_apart(traces):
    folder, answers = traces
    for rank in answers:
        for events in by_track(events_of(folder, rank)).values():
            open_spans = []
            for event in sorted(events, key=lambda e: (e["ts"], -e["dur"])):
                assert event["pid"] == rank
                while open_spans and end(open_spans[-1]) <= event["ts"]:
                    open_spans.pop()
                if open_spans:
                    assert end(event) <= end(open_spans[-1]), event
                open_spans.append(event)


def test_phases_fill_the_step_and_add_up_to_its_seconds(traces):
    folder, answers = traces
    for rank, (phase_s, _) in answers.items():
        track = by_track(events_of(folder, rank))[STEPS]
        whole = [event for event in track if event["name"].startswith("step ")]
        assert [event["name"] for event in whole] == ["step 0", "step 1"]
        for step, seconds in zip(whole, phase_s, strict=True):
            inside = [e for e in track if step["ts"] <= e["ts"] and end(e) <= end(step)]
            phases = [e for e in inside if not e["name"].startswith(("step ", "microbatch "))]
            assert sum(e["dur"] for e in phases) == step["dur"]
            assert step["dur"] == pytest.approx(sum(seconds.values()) * 1e6, abs=1)
            for before, after in pairwise(phases):
                assert after["ts"] == end(before)
            assert {"vision_forward", "exchange", "llm_forward", "llm_backward"} <= {
                event["name"] for event in phases
            }


def test_each_microbatch_holds_its_passes(traces):
    folder, answers = traces
    track = by_track(events_of(folder, 0))[STEPS]
    microbatches = [event for event in track if event["name"].startswith("microbatch ")]
    waves = answers[0][1]
    assert len(microbatches) >= waves
    for microbatch in microbatches:
        held = [
            event["name"]
            for event in track
            if event["name"].startswith("llm_")
            and microbatch["ts"] <= event["ts"] < end(microbatch)
        ]
        assert held == ["llm_forward", "llm_backward"]


def test_rings_and_exchanges_are_transfers_with_their_exposed_waits(traces):
    folder, _ = traces
    events = events_of(folder, 0)
    waits = by_track(events)[WAITS]
    names = {event["name"] for event in waits}
    for part in ("ring attention (forward)", "ring attention (backward)",
                 "the feature exchange (forward)", "the gradient sum"):  # fmt: skip
        assert part in names
    begun = {event["id"]: event for event in events if event["ph"] == "b"}
    ended = {event["id"]: event for event in events if event["ph"] == "e"}
    assert begun.keys() == ended.keys()
    assert len(begun) == len(waits)
    assert all(begun[key]["ts"] <= ended[key]["ts"] for key in begun)


def covered(inner, spans):
    """Whether a wait lies in one of these phases."""
    return any(span["ts"] <= inner["ts"] and end(inner) <= end(span) for span in spans)


def test_phases_count_of_a_transfer_what_no_computing_hid(traces):
    folder, _ = traces
    events = events_of(folder, 0)
    tracks = by_track(events)
    for name, phases in (
        ("ring attention (forward)", {"llm_forward"}),
        ("ring attention (backward)", {"llm_backward"}),
        ("the feature exchange (forward)", {"exchange"}),
    ):
        spans = [event for event in tracks[STEPS] if event["name"] in phases]
        waits = [event for event in tracks[WAITS] if event["name"] == name]
        assert waits
        assert all(covered(wait, spans) for wait in waits), name


DEGREE = 3


def kernels_over_hops(rank, size):
    """By direction: over each hop of the rings of a step, in turn, how many kernels computed
    between posting it and waiting for it; and how many passes there were round a ring."""
    computed, over = [0], defaultdict(list)
    post, wait = PeerGroup.post, Transfer.wait

    def computing(act):
        def compute(*given):
            computed[0] += 1
            return act(*given)

        return compute

    def posted(group, *messages, action, **how):
        transfer = post(group, *messages, action=action, **how)
        if action.startswith("ring attention"):
            transfer.hop = action, len(over[action]), computed[0]
            over[action].append(None)
        return transfer

    def waited(transfer):
        wait(transfer)
        if hasattr(transfer, "hop"):
            action, number, before = transfer.hop
            over[action][number] = computed[0] - before

    PeerGroup.post, Transfer.wait = posted, waited
    PlainKernel.forward = computing(PlainKernel.forward)
    PlainKernel.backward = computing(PlainKernel.backward)
    samples = random_samples(6)
    every, half = list(range(len(samples))), len(samples) // 2
    plan = [[(tuple(range(size)), of_pack)] for of_pack in (every[:half], every[half:])]
    shard = make_shard(samples, plan, size, rank, 6)
    with GroupPool(timeout_s=60) as pool:
        run_step(make_model(()), shard, pool)
    return dict(over), len(plan) * LAYERS


def test_each_hop_of_a_ring_is_under_way_while_a_kernel_computes(world):
    """All but the last of each backward pass, which brings gradients home."""
    for over, passes in world(kernels_over_hops, DEGREE).values():
        forward, backward = (over[f"ring attention ({way})"] for way in ("forward", "backward"))
        assert forward == [1] * (DEGREE - 1) * passes
        of_a_pass = 2 * DEGREE - 1
        assert len(backward) == of_a_pass * passes
        for first in range(0, len(backward), of_a_pass):
            assert backward[first : first + of_a_pass] == [1] * (of_a_pass - 1) + [0]


def test_each_microbatch_is_one_copy_to_the_device(traces):
    folder, answers = traces
    for rank in answers:
        copies = by_track(events_of(folder, rank))[COPIES]
        waves = [event["name"] for event in copies]
        last = int(waves[-1].removeprefix("wave "))
        assert waves[-last - 1 :] == [f"wave {number}" for number in range(last + 1)]
        assert waves.count("wave 0") == 2
        assert sum(event["args"]["bytes"] for event in copies) > 0


def test_files_of_several_ranks_are_joined(traces, tmp_path):
    folder, answers = traces
    whole = tmp_path / "whole.json"
    join_traces([folder / f"rank{rank}.json" for rank in answers], whole)
    events = json.loads(whole.read_text())["traceEvents"]
    assert {event["pid"] for event in events} == set(answers)
    assert len(events) == sum(len(events_of(folder, rank)) for rank in answers)


def test_a_step_that_is_not_traced_notes_no_transfers():
    samples = random_samples(3)
    shard = make_shard(samples, random_plan(samples, 1, (1,), 3), 1, 0, 3)
    with GroupPool() as pool:
        with traced() as trace:
            pass
        run_step(make_model(()), shard, pool)
    assert [event["ph"] for event in trace.events()] == ["M"] * 5


class Counted(PlainQueue):
    """Notes how many microbatches were on the device at once."""

    most = 0

    def start(self, microbatch):
        sent = super().start(microbatch)
        self.seen = [*getattr(self, "seen", ()), ref(sent.microbatch)]
        self.most = max(self.most, sum(each() is not None for each in self.seen))
        return sent


def pipelined(rank, size):
    samples, queue = random_samples(6), Counted(CPU)
    with (
        PipelineMesh(
            stages=size, virtual_stages=1, rank=rank, world_size=size, timeout_s=60
        ) as mesh,
        traced() as trace,
    ):
        shard = make_shard(samples, random_plan(samples, 1, (1,), 6), 1, 0, 6)
        staged = DeviceCopier(CPU, queue=queue).send(shard)
        chunks = cut(make_model(()), size)[rank::size]
        run_pipeline_step(chunks, staged, mesh, HIDDEN)
    names = [event["name"] for event in trace.events() if event.get("tid") == STEPS]
    return len(shard.microbatches), queue.most, names


def test_a_pipelines_passes_are_named_by_their_microbatches_and_few_are_on_the_device(world):
    for number, most, names in world(pipelined, 2).values():
        passes = [name for name in names if name.startswith("microbatch ")]
        assert number > 3
        assert most <= 3, "two under way, and the next one's copies"
        assert sorted(passes) == sorted(
            f"microbatch {k}, {way}" for k in range(number) for way in ("forward", "backward")
        )
