"""Encoders on a stream of their own: whatever crosses is waited for, and kept while it is used.

The device and its streams are played (``played_streams.py``), so that nothing here depends on how
fast anything is.
"""

import pytest

from tests.trainer_client.runtime.fake_device import THERE, moved
from tests.trainer_client.runtime.model_there import (
    IN_A_STEP,
    ModelThere,
    connected_there,
    from_there,
    play_a_stream,
)
from tests.trainer_client.runtime.played_streams import (
    COMPUTING,
    ENCODERS,
    SENDING,
    PlayedStreams,
    StreamedDevice,
    StreamedTransport,
    play,
)
from tests.trainer_client.runtime.random_steps import (
    make_model,
    make_shard,
    random_plan,
    random_samples,
    single_process,
    worst_difference,
)
from trainer_client.runtime import (
    GroupPool,
    encoder_stream,
    evaluate_step,
    group_pool,
    run_step,
    traced,
)
from trainer_client.runtime import step as step_module
from trainer_client.runtime.trace import ENCODERS as ENCODERS_TRACK

BOTH = ("vision", "audio")


def without(what):
    """One of the three ways in which the streams meet, left out."""
    stream = encoder_stream.EncoderStream
    if what == "the encoders' wait":

        class Unordered(stream):
            def entered(self):
                return encoder_stream.torch.cuda.stream(self._stream)

        return Unordered
    if what is not None:
        name = {"the decoder's wait": "wait", "the keeping of memory": "hand_over"}[what]
        return type("Without", (stream,), {name: lambda self, _: None})
    return stream


def played_step(rank, size, cases):
    """Of each case: faults, what each stream did, waits of the host, and the step's error."""
    play_a_stream()
    streams = PlayedStreams()
    play(streams)
    make = group_pool.make_transport
    group_pool.make_transport = lambda *given: StreamedTransport(make(*given), streams)
    return {case: one_step(rank, size, streams, *case) for case in cases}


def one_step(rank, size, streams, seed, frozen, act, options, left_out):
    played = without(left_out)(THERE)
    step_module.encoder_stream_of = lambda device: played
    streams.faults, streams.log = [], []
    streams.operations.clear()
    samples = random_samples(seed)
    shard = make_shard(samples, random_plan(samples, size, (1, 2, 3), seed), size, rank, seed)
    with StreamedDevice(streams) as device, GroupPool(timeout_s=60, lane=str(seed)) as pool:
        connected_there(pool)
        model = make_model(frozen)
        model.__class__ = ModelThere
        on_device = moved_shard(shard)
        moved(model)
        device.reads.clear()
        result = act(model, on_device, pool, **dict(options))
        waited = list(device.reads)
        del on_device
        streams.sweep()
        found = from_there(model)
        loss = result.loss
    alone = make_model(frozen)
    good, grads = single_process(alone, samples)
    error = abs(loss - good) / abs(good)
    if act is run_step:
        error = worst_difference(result, found, good, grads)[1]
    return streams.faults, dict(streams.operations), streams.log, waited, error


def moved_shard(shard):
    return shard.to(THERE)


AHEAD = (("features_ahead", True),)
KINDS = [
    (3, (), run_step, AHEAD, None),
    (5, ("vision",), run_step, AHEAD, None),
    (11, BOTH, run_step, (), None),
    (2, (), evaluate_step, (), None),
]


def test_what_crosses_between_the_streams_is_waited_for_and_kept(world):
    for answers in world(played_step, 4, KINDS).values():
        for case, (faults, operations, log, waited, error) in answers.items():
            assert not faults, (case, faults[:3])
            assert operations[ENCODERS] > 0 < operations[COMPUTING]
            assert {f"{COMPUTING} waits for {ENCODERS}", f"{COMPUTING} keeps memory"} <= set(log)
            assert len(waited) <= IN_A_STEP, "as without a stream: no microbatch waits"
            assert error <= 1e-10, case


@pytest.mark.parametrize(
    ("left_out", "fault"),
    [
        ("the encoders' wait", f"{ENCODERS} reads beside {COMPUTING}"),
        ("the decoder's wait", f"{COMPUTING} reads beside {ENCODERS}"),
        ("the keeping of memory", f"memory of {ENCODERS} is let go while {COMPUTING} uses it"),
    ],
)
def test_whatever_is_left_out_of_it_is_found(world, left_out, fault):
    case = (3, (), run_step, AHEAD, left_out)
    (answer,) = world(played_step, 1, [case]).values()
    assert fault in {what for what, _ in answer[case][0]}


class Watching(ModelThere):
    """Notes, when a decoder's forward pass is queued, what is queued of encoders, and how much of
    that the decoder and what is sent wait for."""

    def decode(self, microbatch, features, attention):
        logits = super().decode(microbatch, features, attention)
        known = self.streams.known
        self.seen.append([known[each][ENCODERS] for each in (ENCODERS, COMPUTING, SENDING)])
        return logits


def watched_step(rank, size):
    """What each decoder of a traced step waited for, and the encoders' track in its trace."""
    play_a_stream()
    streams = PlayedStreams()
    play(streams)
    make = group_pool.make_transport
    group_pool.make_transport = lambda *given: StreamedTransport(make(*given), streams)
    played = encoder_stream.EncoderStream(THERE)
    step_module.encoder_stream_of = lambda device: played
    samples = random_samples(3)
    shard = make_shard(samples, random_plan(samples, size, (2, 3), 3), size, rank, 3)
    with StreamedDevice(streams), GroupPool(timeout_s=60) as pool, traced() as trace:
        connected_there(pool)
        model = make_model(())
        model.__class__, model.streams, model.seen = Watching, streams, []
        run_step(moved(model), moved_shard(shard), pool, features_ahead=True)
    track = [each for each in trace.events() if each["ph"] == "X" and each["tid"] == ENCODERS_TRACK]
    encoded = [
        (wave.wave, modality)
        for wave in shard.microbatches
        for modality in BOTH
        if getattr(wave, modality) is not None
    ]
    spans = [(each["args"]["wave"], each["name"]) for each in track]
    following = [
        any(getattr(wave, modality) is not None for modality in BOTH)
        for wave in shard.microbatches[1:]
    ]
    return model.seen, following, spans, encoded


def test_neither_a_decoder_nor_its_rings_wait_for_encoders_of_the_next_wave(world):
    checked = 0
    for seen, following, spans, encoded in world(watched_step, 3).values():
        for (queued, computing, sending), encodes in zip(seen, following, strict=False):
            if encodes:
                assert computing < queued
                assert sending < queued
                checked += 1
        queued, computing, _ = seen[-1]
        assert computing == queued, "the last one has no wave behind it"
        assert spans == encoded, "each is in the trace, in this order"
    assert checked >= 3


OFF = [
    (3, (), run_step, (("features_ahead", False),), None),
    (3, (), run_step, (), None),
    (3, BOTH, run_step, (("encoder_stream", False),), None),
]


def test_there_is_no_second_stream_where_nothing_goes_ahead_or_none_is_wanted(world):
    (answers,) = world(played_step, 1, OFF).values()
    for case, (faults, operations, _, _, error) in answers.items():
        assert operations.keys() == {COMPUTING}, case
        assert not faults
        assert error <= 1e-10
