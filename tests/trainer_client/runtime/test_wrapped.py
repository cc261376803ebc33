"""DDP and FSDP2 under random plans, against a single process that knows no plan at all."""

import os
from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

from tests.trainer_client.runtime.random_steps import (
    Model,
    make_model,
    make_shard,
    random_plan,
    random_samples,
    single_process,
    weighed,
    whole,
    worst_difference,
    wrapped,
)
from trainer_client.runtime import (
    FsdpReduction,
    GroupPool,
    LayoutError,
    PeerError,
    PeerGroup,
    evaluate_step,
    run_step,
)


def parity_cases(rank, size, cases):
    answer = {}
    with GroupPool(timeout_s=60) as pool:
        for how, seed, degrees, frozen in cases:
            samples = random_samples(seed)
            waves = random_plan(samples, size, degrees, seed)
            shard = make_shard(samples, waves, size, rank, seed)
            model = everything_gathered_twice() if how == TWICE else wrapped(how, frozen)
            gradients = None
            if how == "fsdp, every microbatch":
                gradients = FsdpReduction(model, pool.everyone, every_microbatch=True)
            evaluated = evaluate_step(model, shard, pool)
            result = run_step(model, shard, pool, gradients=gradients)
            assert evaluated.loss == pytest.approx(result.loss, rel=1e-12)
            found = whole(model)
            loss, grads = single_process(make_model(frozen), samples)
            used = {len(members) for wave in waves for members, _ in wave}
            answer[how, seed] = (*worst_difference(result, found, loss, grads), used)
    return answer


TWICE = "fsdp, gathered for each pass"
WAYS = ("ddp", "fsdp", "hsdp", "fsdp, every microbatch", TWICE)


def everything_gathered_twice():
    """What the head gives, the whole model gives; the weights of both are gathered in the backward
    pass, in the order of their hooks, which an idle replica must share."""
    model = make_model(())
    for part in (*model.encoders.values(), *model.layers, model.head, model):
        fully_shard(part, reshard_after_forward=True)
    return model


@pytest.mark.parametrize(
    ("ranks", "degrees"), [(4, (1, 2, 3)), pytest.param(6, (1, 2, 3, 5), marks=pytest.mark.long)]
)
def test_wrapped_models_get_the_gradients_of_a_single_process(world, ranks, degrees):
    cases = [(how, seed, degrees, ()) for how in WAYS for seed in (10, 11)]
    cases += [(how, 13, degrees, ("vision",)) for how in WAYS[:2]]
    seen = set()
    for rank, answer in world(parity_cases, ranks, cases).items():
        assert len(answer) == len(cases)
        for case, (parameter, difference, used) in answer.items():
            assert difference <= 1e-10, (rank, case, parameter, difference)
            seen |= used
    assert seen >= set(degrees)


def evaluated_before_the_optimizer_steps(rank, size, ways):
    """The loss behind a step of the optimizer, with an evaluation before it and without."""
    samples, losses = random_samples(10), {}
    waves = random_plan(samples, size, (1, 2), 10)
    with GroupPool(timeout_s=60) as pool:
        for how in ways:
            for evaluates in (False, True):
                model, shard = wrapped(how, ()), make_shard(samples, waves, size, rank, 10)
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
                run_step(model, shard, pool)
                if evaluates:
                    evaluate_step(model, shard, pool)
                optimizer.step()
                losses[how, evaluates] = evaluate_step(model, shard, pool).loss
    return losses


def test_an_evaluation_before_the_optimizer_steps_keeps_no_weights_of_before(world):
    for losses in world(evaluated_before_the_optimizer_steps, 2, ("plain", "fsdp")).values():
        assert losses.keys() == {(how, each) for how in ("plain", "fsdp") for each in (0, 1)}
        assert max(losses.values()) - min(losses.values()) <= 1e-10, losses


def text_last(rank, size, ways):
    """Steps of which encoders alone train, and whose last wave has nothing to encode."""
    frozen, answer = ("decoder", "audio"), {}
    samples = random_samples(10)
    seen = [number for number, sample in enumerate(samples) if sample.items]
    text = [number for number, sample in enumerate(samples) if not sample.items]
    waves = [[((0,), seen[::2]), ((1,), seen[1::2])], [((0, 1), text)]]
    with GroupPool(timeout_s=60) as pool:
        for how in ways:
            shard = make_shard(samples, waves, size, rank, 10)
            model = wrapped(how, frozen)
            result = run_step(model, shard, pool)
            alone = single_process(make_model(frozen), samples)
            answer[how] = worst_difference(result, whole(model), *alone)
    return answer


def test_a_wave_in_which_nothing_trains_may_be_the_last_of_a_step(world):
    for answer in world(text_last, 2, ("plain", "ddp", "fsdp")).values():
        assert len(answer) == 3
        for how, (parameter, difference) in answer.items():
            assert difference <= 1e-10, (how, parameter)


class CountingCollectives(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if operation.namespace == "c10d":
            self.counts[operation.overloadpacket.__name__] += 1
        return operation(*args, **(kwargs or {}))


def collectives(rank, size):
    """Microbatches, gathers and reductions of a step in FSDP2, reductions of one in DDP."""
    samples = random_samples(12)
    shard = make_shard(samples, random_plan(samples, size, (1, 2), 12), size, rank, 12)
    ddp, reduced = wrapped("ddp", ()), []

    def count(state, bucket):
        reduced.append(bucket.buffer().numel())
        return allreduce_hook(state, bucket)

    ddp.register_comm_hook(None, count)
    with GroupPool(timeout_s=60) as pool:
        with CountingCollectives() as mode:
            run_step(wrapped("fsdp", ()), shard, pool)
        run_step(ddp, shard, pool)
    idle = sum(mb.idle for mb in shard.microbatches)
    return len(shard.microbatches), idle, mode.counts, reduced


def test_gradients_are_reduced_once_a_step_and_all_replicas_gather_equally_often(world):
    answers = world(collectives, 4)
    microbatches, _, counts, reduced = answers[0]
    assert microbatches > 2
    assert any(idle for _, idle, _, _ in answers.values())
    assert counts["_reduce_scatter_base_"] == 5  # two encoders, two layers, the rest
    assert reduced == [sum(p.numel() for p in make_model(()).parameters())]
    for _, _, other, also_reduced in answers.values():
        assert other == counts
        assert also_reduced == reduced


class Events(TorchDispatchMode):
    """Lists what torch communicates, beside what else is put into it."""

    def __init__(self):
        super().__init__()
        self.order = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if operation.namespace == "c10d":
            self.order.append("communicates")
        return operation(*args, **(kwargs or {}))


def noting(post, order):
    """A way of PeerGroup to communicate, which lists where it does."""

    def noted(group, *given, **named):
        messages = [t for each in given for t in (each if isinstance(each, list) else [(each, 0)])]
        if any(tensor.numel() for tensor, _ in messages):
            order.append("communicates")
        return post(group, *given, **named)

    return noted


def meetings(rank, size):
    """In a step of text whose packs no replicas share: what is decoded and communicated, in order,
    without a wrapper and in DDP."""
    samples = random_samples(12)
    for sample in samples:
        sample.items = []
    shard = make_shard(samples, random_plan(samples, size, (1,), 12), size, rank, 12)
    loss, grads = single_process(make_model(()), samples)
    ways = {name: getattr(PeerGroup, name) for name in ("post", "post_sum", "post_least", "gather")}
    found = []
    with GroupPool(timeout_s=60) as pool:
        for how in ("plain", "ddp"):
            model, events = wrapped(how, ()), Events()
            for name, post in ways.items():
                setattr(PeerGroup, name, noting(post, events.order))
            head = (model.module if how == "ddp" else model).head
            head.register_forward_hook(lambda *_, order=events.order: order.append("decodes"))
            with events:
                result = run_step(model, shard, pool)
            found.append((events.order, worst_difference(result, whole(model), loss, grads)[1]))
    return found, len(shard.microbatches)


def test_replicas_whose_model_is_not_sharded_meet_once_a_step(world):
    for found, microbatches in world(meetings, 2).values():
        assert microbatches > 2
        for order, difference in found:
            assert difference <= 1e-10
            assert order.count("decodes") == microbatches
            last = len(order) - 1 - order[::-1].index("decodes")
            first = order.index("decodes")
            assert order[first : last + 1] == ["decodes"] * microbatches, "none between waves"
            assert "communicates" in order[:first], "plans are compared"
            assert "communicates" in order[last:], "gradients are summed"


class Headless(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)


def refusals(rank, size):
    samples = random_samples(3)
    shard = make_shard(samples, random_plan(samples, size, (1,), 3), size, rank, 3)
    half = make_model(())
    fully_shard(half.layers[0])
    alone = torch.distributed.new_group([rank], use_local_synchronization=True)
    said = []
    with GroupPool(timeout_s=60) as pool:
        for model in (
            half,
            fully_shard(Headless()),
            nn.parallel.DistributedDataParallel(make_model(()), process_group=alone),
            nn.parallel.DistributedDataParallel(make_model(()), static_graph=True),
        ):
            try:
                run_step(model, shard, pool)
            except LayoutError as error:
                said.append(str(error))
    return said


def test_a_model_that_is_wrapped_wrongly_is_refused_with_the_remedy(world):
    for half, headless, alone, static in world(refusals, 2).values():
        assert "sharded parts (layers.0)" in half
        assert "define forward(self, microbatch, groups)" in headless
        assert "reduced over 1 ranks" in alone
        assert "2 replicas" in alone
        assert "static_graph=True" in static


def half_precision(rank, size):
    samples = random_samples(10)
    shard = make_shard(samples, random_plan(samples, size, (1, 2, 3), 10), size, rank, 10)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = make_model(()).float()
    for part in (*model.encoders.values(), *model.layers, model):
        fully_shard(part, mp_policy=policy)
    with GroupPool(timeout_s=60) as pool:
        result = run_step(model, shard, pool)
    loss, grads = single_process(make_model(()), samples)
    return worst_difference(result, whole(model), loss, grads)


def test_fsdp_may_compute_in_half_precision(world):
    for parameter, difference in world(half_precision, 4).values():
        assert difference < 0.1, parameter


class Looking(Model):
    """Notes what its wrapper made of the microbatches before it got them."""

    def forward(self, microbatch, groups):
        batches = [batch for batch in (microbatch.vision, microbatch.audio) if batch is not None]
        self.seen.append((set(microbatch.reads), *(set(batch.reads) for batch in batches)))
        self.types.add(microbatch.weights.dtype)
        self.types |= {item.dtype for batch in batches for item in batch.items}
        return super().forward(microbatch, groups)

    def encode(self, modality, batch):
        kind = self.head.weight.dtype  # as a model of half precision takes its items
        return super().encode(modality, replace(batch, items=[i.to(kind) for i in batch.items]))


def looked_at(rank, size):
    samples = weighed(random_samples(10), 10)
    shard = make_shard(samples, random_plan(samples, size, (1, 2), 10), size, rank, 10)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    found = []
    with GroupPool(timeout_s=60) as pool:
        for how in ("fsdp", "ddp"):
            model = make_model(()).float()
            model.__class__, model.seen, model.types = Looking, [], set()
            for mb in shard.microbatches:
                for holder in (mb, mb.vision, mb.audio):
                    if holder is not None:
                        holder.reads.clear()
            if how == "ddp":
                wrapper = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
            else:
                for part in (*model.encoders.values(), *model.layers, model):
                    fully_shard(part, mp_policy=policy)
                wrapper = model
            evaluate_step(wrapper, shard, pool)
            found.append((model.seen, model.types))
    return found


def test_a_wrapper_neither_reads_nor_casts_what_is_in_a_microbatch(world):
    for found in world(looked_at, 2).values():
        for seen, types in found:
            assert seen[0][0] <= {"labels"}, "counted before the first microbatch"
            assert all(not of_media for _, *media in seen[:1] for of_media in media)
            assert types == {torch.float64}


LOST, LIMIT_S = 2, 20.0  # a death is noticed at once; no survivor may be late on a busy machine


def dying_rank(rank, size, how):
    samples = random_samples(10)
    shard = make_shard(samples, random_plan(samples, size, (1, 2), 10), size, rank, 10)
    model = wrapped(how, ())
    module = model.module if how == "ddp" else model
    decode = module.decode

    def decode_or_die(microbatch, *others):
        if rank == LOST and microbatch.wave == 1:
            os._exit(9)
        return decode(microbatch, *others)

    module.decode = decode_or_die
    torch.distributed.barrier()
    with GroupPool(timeout_s=LIMIT_S) as pool:
        try:
            run_step(model, shard, pool, features_ahead=True)  # some are on their way
        except RuntimeError as error:
            return error.culprits if isinstance(error, PeerError) else str(error)


@pytest.mark.parametrize("how", ["plain", "ddp", "fsdp"])
def test_a_replica_that_dies_in_a_step_is_named_to_the_others(world, how):
    # DDP and FSDP may notice it in a collective of their own, which names nobody.
    answers = world(dying_rank, 4, how)
    assert answers == dict.fromkeys((0, 1, 3), (LOST,))
