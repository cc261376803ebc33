"""A pipeline makes its few communicators with its mesh, and none in any step; none can deadlock.
No microbatch waits for the device, wherever encoders run.

Each rank's steps run alone, by NCCL's rules: a message on its own, which would make a communicator
of two, fails. What all ranks post is then replayed together (``posted_order.py``).
"""

import dataclasses
import random

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn import Parameter

from demo.chunks import DemoEncoders, lay_out_model, sum_tied_gradient
from demo.model import DemoModel, ModelConfig
from tests.demo.scripted_steps import (
    TWO_REPLICAS,
    scripted_samples,
    shard_of,
    step_plan,
)
from tests.trainer_client.runtime.fake_device import THERE, FakeDevice, moved
from tests.trainer_client.runtime.model_there import IN_A_PIPELINE_STEP, PlayedStream
from tests.trainer_client.runtime.posted_order import Wait, stuck
from tests.trainer_client.runtime.recorded_transport import RecordedTransport
from tests.trainer_client.runtime.world_device import DEVICE
from trainer_client.runtime import (
    BubbleSchedule,
    EncoderAction,
    HiddenStates,
    LayoutError,
    PipelineMesh,
    StageLayout,
    clock,
    encoder_runs,
    one_forward_one_backward,
    pipeline_parallel,
    pipeline_timeline,
    run_pipeline_step,
    sum_of_stages,
)
from trainer_client.runtime.pipeline_schedule import Action

LAYERS = 8
CONFIG = ModelConfig(vocabulary=64, width=32, layers=LAYERS, heads=4, kv_heads=2, encoder_width=16)
HIDDEN = HiddenStates(width=CONFIG.width, dtype=torch.float64)
ENCODERS = ("vision", "vision", "audio")
PLACES = ("first", "own", "cut", "spread")
PIPELINES = [(2, 1), (2, 2), (4, 1), (4, 2)]  # stages and virtual stages
WAITS = {(2, 1, "first"), (2, 1, "own"), (2, 1, "spread"), (2, 2, "cut")}  # of these, in CI
# By replicas: the second step has more microbatches, whose encoders run on other stages.
STEPS = {
    1: ([(0, (0,), [0, 1, 2, 3])], [(wave, (0,), [wave]) for wave in range(4)]),
    2: ([(0, (1, 0), [0, 1, 2, 3])], [*TWO_REPLICAS, (3, (1,), [4])]),
}


def laid_out(place, stages, virtual_stages):
    """A layout of LAYERS decoder layers; where encoders are cut, over the first two chunks."""
    chunks = stages * virtual_stages
    ends = [LAYERS * number // chunks for number in range(1, chunks + 1)]
    modules = ENCODERS + ("llm",) * LAYERS
    if place == "spread":
        modules, bounds = modules[len(ENCODERS) :], [0, *ends]
    elif place == "own":
        bounds = [0, len(ENCODERS), *(len(ENCODERS) + end for end in ends[1:])]
    elif place == "cut":
        bounds = [0, 1, *(len(ENCODERS) + end for end in ends[1:])]
    else:
        bounds = [0, *(len(ENCODERS) + end for end in ends)]
    return StageLayout(
        modules=modules,
        bounds=tuple(bounds),
        virtual_stages=virtual_stages,
        encoder_stage=place,
    )


class Rank:
    """One rank's mesh, and its steps by a layout."""

    def __init__(self, layout, rank, replicas=1, *, there=False):
        """``there``: it computes on the played device."""
        self.there = there
        self.model = DemoModel(CONFIG).double()
        if there:
            self.model = moved(self.model)
        for weight in self.model.parameters():
            weight.grad = torch.zeros_like(weight)  # on all ranks, as played sums have it
        self.mesh = PipelineMesh(
            stages=layout.stages,
            virtual_stages=layout.virtual_stages,
            encoder_stage=layout.encoder_stage,
            encoder_cut=layout.encoder_cut,
            rank=rank,
            world_size=layout.stages * replicas,
        )
        if there:
            self.mesh.column.device = self.mesh.row.device = THERE
        self.chunks = lay_out_model(self.model, layout)[self.mesh.stage :: layout.stages]
        alone = layout.encoder_stage in ("spread", "cut")
        self.encoders = DemoEncoders(self.model, cut=layout.encoder_cut) if alone else None

    def step(self, packs, schedule=None):
        """Train, and add up the embedding's gradients, which is the head as well."""
        held = 1 + max(sample for *_, of_pack in packs for sample in of_pack)
        samples = [*scripted_samples(), *scripted_samples(1)][:held]
        items = sum(len(order.lengths.items) for order, _ in samples)
        encodes = [number % self.mesh.replicas for number in range(items)]
        shard = shard_of(step_plan(samples, packs, encodes), samples, self.mesh.replica)
        hidden = dataclasses.replace(HIDDEN, device=THERE if self.there else None)
        run_pipeline_step(
            self.chunks,
            shard.to(THERE) if self.there else shard,
            self.mesh,
            hidden,
            schedule=schedule,
            encoders=self.encoders,
        )
        sum_tied_gradient(self.chunks, self.mesh)


def trained(recorder, layout, replicas):
    """By rank: what it posted in two steps, the communicators that it made with its mesh, and in
    the steps."""
    queues, with_mesh, in_steps = {}, {}, {}
    for rank in range(layout.stages * replicas):
        queues[rank] = recorder.begin()
        trainer = Rank(layout, rank, replicas)
        with_mesh[rank] = list(recorder.made)
        for packs in STEPS[replicas]:
            trainer.step(packs)
        in_steps[rank] = recorder.made[len(with_mesh[rank]) :]
        assert trainer.mesh.communicators == len(recorder.made)
        trainer.mesh.close()
    return queues, with_mesh, in_steps


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("stages", "virtual_stages"), PIPELINES)
def test_no_step_makes_a_communicator_and_none_can_deadlock(
    recorder, stages, virtual_stages, place
):
    replicas = 2 if stages == 2 else 1
    layout = laid_out(place, stages, virtual_stages)
    queues, with_mesh, in_steps = trained(recorder, layout, replicas)
    assert not any(in_steps.values())
    channels = 4 if virtual_stages > 1 or stages > 2 else 2
    at_most = channels + 1 + (replicas > 1)  # those, the row's, and the column's
    assert max(map(len, with_mesh.values())) == at_most
    assert not stuck(queues)


def test_a_stage_that_fails_ends_its_kernels_and_waits_for_none(recorder, monkeypatch):
    ended = []
    for how in ("shutdown", "abort"):
        monkeypatch.setattr(RecordedTransport, how, lambda _, how=how: ended.append(how))
    with pytest.raises(MemoryError), PipelineMesh(stages=2, rank=0, world_size=4):
        raise MemoryError
    assert ended == ["abort"] * len(recorder.made)


@pytest.mark.parametrize(
    ("stages", "virtual_stages", "place"),
    [
        pytest.param(*case, marks=[] if case in WAITS else pytest.mark.full)
        for case in ((*pipeline, place) for pipeline in PIPELINES[:2] for place in PLACES)
    ],
)
def test_no_microbatch_makes_the_host_wait_for_the_device_wherever_encoders_run(
    recorder, monkeypatch, stages, virtual_stages, place
):
    for module in (clock, pipeline_timeline):
        monkeypatch.setattr(module, "start_clock", PlayedStream)
    layout, replicas = laid_out(place, stages, virtual_stages), 2
    # Which gradients there are is asked along the row too where its stages encode alike.
    in_a_step = IN_A_PIPELINE_STEP + (place == "spread")
    with FakeDevice() as device:
        for rank in range(stages * replicas):
            recorder.begin()
            trainer = Rank(layout, rank, replicas, there=True)
            for packs in STEPS[replicas]:
                device.reads.clear()
                trainer.step(packs)
                assert device.reads == ["a copy to the host"] * in_a_step
            trainer.mesh.close()


LAYERS_OF = (2, 1)  # of the encoders of vision and sound


def random_schedule(stages, virtual_stages, seed):
    """A list of actions that can run, with encoder layers anywhere, microbatches in any order."""
    draw, microbatches = random.Random(seed), len(STEPS[1][1])
    backbone = one_forward_one_backward(stages, virtual_stages, microbatches)
    waiting = [
        (stage, EncoderAction(kind, microbatch, encoder, layer, layer + 1))
        for microbatch in range(microbatches)
        for encoder, layers in enumerate(LAYERS_OF)
        for layer in range(layers)
        for stage in [draw.randrange(stages)]  # which has what its backward needs
        for kind in ("EF", "EB")
    ]
    chains = [list(actions) for actions in backbone.actions]
    done, lists = set(), [[] for _ in range(stages)]

    def runs(stage, action):
        """Whether all that it needs has run."""
        if isinstance(action, EncoderAction):
            _, m, e, first, end = dataclasses.astuple(action)
            before = EncoderAction("EF", m, e, first - 1, first) if first else None
            if action.kind == "EB":
                last = end == LAYERS_OF[e]
                before = (0, Action("B", m)) if last else EncoderAction("EB", m, e, end, end + 1)
            return before is None or before in done
        first = stage == 0 and action.kind == "F" and action.virtual_stage == 0
        encoded = [
            EncoderAction("EF", action.microbatch, e, layers - 1, layers)
            for e, layers in enumerate(LAYERS_OF)
        ]
        needed = [*backbone.needs(stage, action), *(encoded if first else [])]
        return done.issuperset(needed)

    while waiting or any(chains):
        heads = [(stage, chain[0]) for stage, chain in enumerate(chains) if chain]
        choices = [choice for choice in (*waiting, *heads) if runs(*choice)]
        stage, action = draw.choice(choices)
        lists[stage].append(action)
        if isinstance(action, EncoderAction):
            waiting.remove((stage, action))
            done.add(action)
        else:
            done.add((stage, chains[stage].pop(0)))
    return BubbleSchedule(actions=tuple(map(tuple, lists)))


def queues_of(recorder, stages, virtual_stages, seed):
    """What the stages post whose encoders run by such a list."""
    layout = laid_out("spread", stages, virtual_stages)
    schedule = random_schedule(stages, virtual_stages, seed)
    queues = {}
    for rank in range(stages):
        queues[rank] = recorder.begin()
        trainer = Rank(layout, rank)
        trainer.step(STEPS[1][1], schedule)
        trainer.mesh.close()
    return queues


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("stages", "virtual_stages"), PIPELINES[:3])
def test_encoders_anywhere_come_through_on_the_communicator_of_all_stages(
    recorder, stages, virtual_stages, seed
):
    assert not stuck(queues_of(recorder, stages, virtual_stages, seed))


class AsTheyCome:
    """Messages of encoders that each stage posts as it comes to them."""

    def __init__(self, mesh, schedule, *, travels, room_for):
        self.row, self.room_for, self.kept = mesh.row, room_for, {}
        self.messages = {message.hop: message for message in schedule.messages}

    def begin(self, action):
        pass

    def give(self, hop, tensor):
        if hop in self.messages:
            sent = [(tensor.contiguous(), self.messages[hop].receiver)]
            self.row.post(sent, [], action="a test")
        else:
            self.kept[hop] = tensor

    def take(self, hop):
        if hop not in self.messages:
            return self.kept.pop(hop)
        arriving = self.room_for(hop)
        taken = [(arriving, self.messages[hop].sender)]
        self.row.post([], taken, action="a test").wait()
        return arriving

    def finish(self):
        pass


def test_messages_of_encoders_that_stages_post_as_they_come_to_them_would_deadlock(
    recorder, monkeypatch
):
    monkeypatch.setattr(encoder_runs, "EncoderMessages", AsTheyCome)
    assert any(stuck(queues_of(recorder, 4, 1, seed)) for seed in range(4))


def most_awaited(queue, communicator):
    """How many messages were under way to a rank at once."""
    under_way, most = set(), 0
    for each in queue:
        if isinstance(each, Wait):
            under_way.discard(each.number)
        elif communicator in each.communicator and [kind for kind, *_ in each.batch] == ["recv"]:
            under_way.add(each.number)
            most = max(most, len(under_way))
    return most


def test_features_are_taken_an_action_ahead_and_not_all_at_once(recorder):
    """Room for those of all microbatches is what the first stage may not have."""
    queue = recorder.begin()
    frozen = Rank(laid_out("spread", 2, 1), 0)
    frozen.model.encoders.requires_grad_(False)
    frozen.step(STEPS[1][1])
    assert most_awaited(queue, "F/1//everyone") == len(LAYERS_OF), "of one microbatch"


def tied_gradients(rank, size):
    """What a stage has of a tied weight's gradient in the end: plain, sharded over its column, and
    where one stage alone has any; and the communicators that this made."""
    pipeline_parallel.BUCKET_BYTES = 40  # a row or two at a time
    column = init_device_mesh(DEVICE.type, (size // 2, 2), mesh_dim_names=("column", "row"))[
        "column"
    ]
    with PipelineMesh(stages=2, timeout_s=60) as mesh:
        made = mesh.communicators
        whole = torch.arange(15.0, device=DEVICE).view(5, 3)
        plain, alone = Parameter(torch.zeros_like(whole)), Parameter(torch.zeros_like(whole))
        sharded = Parameter(distribute_tensor(torch.zeros_like(whole), column, [Shard(0)]))
        plain.grad = whole * (1 + mesh.stage)
        sharded.grad = distribute_tensor(whole * (1 + mesh.stage), column, [Shard(0)])
        alone.grad = whole.clone() if mesh.stage else None
        for weight in (plain, sharded, alone):
            sum_of_stages(weight, mesh)
        made_later = mesh.communicators - made
    return plain.grad.cpu(), sharded.grad.full_tensor().cpu(), alone.grad.cpu(), made_later


def test_gradients_of_a_tied_weight_are_added_up_over_the_communicator_of_all_stages(world):
    whole = torch.arange(15.0).view(5, 3)
    for plain, sharded, alone, made_later in world(tied_gradients, 4).values():
        assert torch.equal(plain, 3 * whole)
        assert torch.equal(sharded, 3 * whole)
        assert torch.equal(alone, whole)
        assert made_later == 0


def test_a_stage_that_shares_no_weight_is_told(recorder):
    words = r"stage 1 shares no weight: stages \[0, 2\] embed"
    mesh = PipelineMesh(stages=3, rank=1, world_size=3)
    with mesh, pytest.raises(LayoutError, match=words):
        sum_of_stages(Parameter(torch.zeros(2, 2)), mesh)
