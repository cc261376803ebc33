"""The next wave's items are encoded and sent before the decoder has the present one: the same
bits, and features that are there when they are needed."""

import json
from itertools import pairwise
from weakref import WeakSet

import pytest
import torch

from tests.trainer_client.runtime.random_steps import (
    Model,
    make_model,
    make_shard,
    random_plan,
    random_samples,
    single_process,
    whole,
    worst_difference,
    wrapped,
)
from trainer_client.device import DeviceCopier, PlainQueue
from trainer_client.runtime import (
    GroupPool,
    LayoutError,
    PeerGroup,
    evaluate_step,
    run_step,
    traced,
)
from trainer_client.runtime.clock import host_time
from trainer_client.runtime.peers import Transfer
from trainer_client.runtime.phases import moves_rows
from trainer_client.runtime.trace import STEPS, WAITS

BOTH = ("vision", "audio")


def random_shard(seed, size, rank):
    samples = random_samples(seed)
    return samples, make_shard(
        samples, random_plan(samples, size, (1, 2, 3), seed), size, rank, seed
    )


def other_bits(one, other):
    """The parameters whose gradients are not the same bits, and how far they are apart."""
    found = {}
    for (name, p), q in zip(one.named_parameters(), other.parameters(), strict=True):
        if p.grad is None or q.grad is None:
            if p.grad is not q.grad:
                found[name] = "one of them has none"
        elif not torch.equal(p.grad, q.grad):
            found[name] = float((p.grad - q.grad).norm())
    return found


def with_and_without(rank, size, cases):
    """By case: what is not the same bits as with features ahead (once more, without them, by
    default), the losses, and the difference to a single process."""
    found = {}
    with GroupPool(timeout_s=60) as pool:
        for how, seed, frozen in cases:
            samples, shard = random_shard(seed, size, rank)
            results, gradients = [], []
            for ahead in (True, True, False, None):
                model = wrapped(how, frozen)
                results.append(run_step(model, shard, pool, features_ahead=ahead))
                gradients.append(whole(model))
            unlike = [other_bits(gradients[0], other) for other in gradients[1:]]
            losses = {result.loss for result in results}
            loss, grads = single_process(make_model(frozen), samples)
            difference = worst_difference(results[0], gradients[0], loss, grads)
            found[how, seed, frozen] = unlike, losses, difference
    return found


@pytest.mark.parametrize(
    "ways",
    [("plain", "fsdp"), pytest.param(("plain", "ddp", "fsdp", "hsdp"), marks=pytest.mark.long)],
)
def test_a_wave_that_is_encoded_ahead_gives_the_same_bits(world, ways):
    cases = [(how, 11, ()) for how in ways]
    cases += [("plain", 13, BOTH), (ways[-1], 13, ("vision",))]
    for found in world(with_and_without, 4, cases).values():
        for case, (unlike, losses, (parameter, difference)) in found.items():
            again, *others = unlike
            assert again == {}, (case, "the same twice: features ahead are not why bits differ")
            assert others == [{}, {}], case
            assert len(losses) == 1, case
            assert difference <= 1e-10, (case, parameter, difference)


class Noting(Model):
    """Notes what it encodes and decodes, by waves."""

    def watch(self, shard):
        self.order = []
        self.wave_of = {}
        for wave, microbatch in enumerate(shard.microbatches):
            for batch in (microbatch.vision, microbatch.audio):
                for item in batch.items if batch is not None else ():
                    self.wave_of[item.data_ptr()] = wave

    def encode(self, modality, batch):
        for item in batch.items:
            if item.data_ptr() in self.wave_of:
                self.order.append(("encode", self.wave_of[item.data_ptr()]))
        return super().encode(modality, batch)

    def decode(self, microbatch, features, attention):
        self.order.append(("decode", microbatch.wave))
        return super().decode(microbatch, features, attention)


def order_of(frozen, act, **options):
    """What was encoded and decoded when, and the modalities of each wave."""
    _, shard = random_shard(6, 1, 0)
    model = make_model(frozen)
    model.__class__ = Noting
    model.watch(shard)
    with GroupPool() as pool:
        act(model, shard, pool, **options)
    assert {wave for kind, wave in model.order if kind == "encode"} == set(range(4))
    of_waves = [{m for m in BOTH if getattr(mb, m) is not None} for mb in shard.microbatches]
    return model.order, of_waves


@pytest.mark.parametrize(
    ("frozen", "act", "options", "ahead"),
    [
        ((), run_step, {"features_ahead": True}, BOTH),
        ((), run_step, {"features_ahead": False}, ()),
        (BOTH, run_step, {"features_ahead": False}, ()),
        ((), run_step, {}, ()),
        (("vision",), run_step, {}, ("vision",)),
        (BOTH, run_step, {}, BOTH),
        ((), evaluate_step, {}, BOTH),
    ],
)
def test_one_wave_is_encoded_ahead_where_it_is_asked_for_or_keeps_nothing(
    frozen, act, options, ahead
):
    order, of_waves = order_of(frozen, act, **options)
    seen = set()
    for wave, following in enumerate([*of_waves[1:], None]):
        before = order[: order.index(("decode", wave))]
        encoded = {of for kind, of in before if kind == "encode"}
        goes_ahead = following is not None and following <= set(ahead)
        assert encoded >= set(range(wave + 1 + goes_ahead))
        assert max(encoded) == wave + goes_ahead
        seen.add(goes_ahead)
    assert seen == ({True, False} if ahead else {False})


def different_settings(rank, size):
    _, shard = random_shard(3, size, rank)
    with GroupPool(timeout_s=60) as pool:
        try:
            run_step(make_model(()), shard, pool, features_ahead=(True, None, False)[rank])
        except LayoutError as error:
            return str(error)


def test_replicas_that_would_exchange_in_different_orders_are_refused(world):
    answers = world(different_settings, 3)
    for rank, said in enumerate(("True", "None", "False")):
        assert f"replica {rank} calls run_step with features_ahead={said}" in answers[rank]
        assert "give the same on all replicas" in answers[rank]


def traced_step(rank, size, folder):
    _, shard = random_shard(6, size, rank)
    with GroupPool(timeout_s=60) as pool, traced() as trace:
        run_step(make_model(()), shard, pool, features_ahead=True)
    trace.write(f"{folder}/rank{rank}.json")


def test_a_trace_shows_features_on_their_way_under_the_decoder(world, tmp_path):
    world(traced_step, 3, str(tmp_path))
    under = 0
    for rank in range(3):
        events = json.loads((tmp_path / f"rank{rank}.json").read_text())["traceEvents"]
        decoding = [e for e in events if e["name"] == "llm_backward" and e["tid"] == STEPS]
        encoding = [e for e in events if e["name"] == "vision_forward" and e["tid"] == STEPS]
        waves = [event["args"]["wave"] for event in encoding]
        assert waves == sorted(waves), "each says which wave's items they are"
        assert all(a["ts"] < b["ts"] for a, b in pairwise(decoding))
        flights = {}
        for event in events:
            if event["ph"] in "be" and event["name"] == "the feature exchange (forward)":
                assert event["tid"] == WAITS
                flights.setdefault(event["id"], {})[event["ph"]] = event["ts"]
        under += sum(
            flight["b"] <= decoder["ts"] and decoder["ts"] + decoder["dur"] <= flight["e"]
            for flight in flights.values()
            for decoder in decoding
        )
    assert under >= 3, "from being posted to being waited for, round a whole backward pass"


TRAVEL_S, DECODE_S = 5.0, 7.0  # of an exchange, and of the decoder in each direction


def played_seconds(rank, size, ahead):
    """What a step's exchanges take of it where time passes in the decoder, and while features
    travel, alone; and the waves in which this replica's do."""
    now, post, wait, decode = [0.0], PeerGroup.post, Transfer.wait, Model.decode

    def pass_s(seconds):
        now[0] += seconds

    def posted(group, *messages, action, **how):
        transfer = post(group, *messages, action=action, **how)
        sent = any(tensor.numel() for of_way in messages for tensor, _ in of_way)
        if sent and action == "the feature exchange (forward)":
            transfer.there_s = now[0] + TRAVEL_S
        return transfer

    def waited(transfer):
        wait(transfer)
        now[0] = max(now[0], getattr(transfer, "there_s", 0.0))

    def decoded(*given):
        logits = decode(*given)
        pass_s(DECODE_S)
        logits.register_hook(lambda _: pass_s(DECODE_S))
        return logits

    PeerGroup.post, Transfer.wait, Model.decode = posted, waited, decoded
    _, shard = random_shard(6, size, rank)
    with GroupPool(timeout_s=60) as pool, host_time(lambda: now[0]):
        result = run_step(make_model(BOTH), shard, pool, features_ahead=ahead)
    batches = [[getattr(mb, name) for name in BOTH] for mb in shard.planned]
    travels = [
        any(moves_rows(batch.exchange, replica=rank) for batch in of_wave if batch is not None)
        for of_wave in batches
    ]
    return travels, result.phase_s


def test_phases_count_of_an_exchange_what_no_decoder_hid(world):
    for ahead in (False, True):
        for travels, phase_s in world(played_seconds, 2, ahead).values():
            assert sum(travels) > 1
            exposed = travels[:1] if ahead else travels  # no decoder runs before the first wave
            assert phase_s["exchange"] + phase_s["waiting"] == sum(exposed) * TRAVEL_S
            assert phase_s["llm"] == len(travels) * 2 * DECODE_S


class Counting(PlainQueue):
    """Knows how many microbatches are on the device."""

    def __init__(self, device):
        super().__init__(device)
        self.alive, self.copies = WeakSet(), 0

    def start(self, microbatch):
        sent = super().start(microbatch)
        self.alive.add(sent.microbatch)
        self.copies += 1
        return sent


@pytest.mark.parametrize(("ahead", "most"), [(True, 3), (False, 2)])
def test_so_many_microbatches_are_on_the_device_while_the_decoder_computes(ahead, most):
    _, shard = random_shard(6, 1, 0)
    queue, held = Counting(torch.device("cpu")), []
    staged = DeviceCopier(torch.device("cpu"), queue=queue).send(shard)

    class Watching(Model):
        def decode(self, *given):
            held.append(len(queue.alive))
            return super().decode(*given)

    model = make_model(())
    model.__class__ = Watching
    with GroupPool() as pool:
        run_step(model, staged, pool, features_ahead=ahead)
    assert queue.copies == len(shard.microbatches), "each is copied once"
    assert max(held) == most
