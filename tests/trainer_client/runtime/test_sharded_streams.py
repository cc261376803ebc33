"""FSDP2 beside the runtime: nothing is read before it is there, and no memory is taken too early.

All streams are played (``played_sharding.py``), so nothing here depends on how fast anything is.
"""

import torch

from tests.trainer_client.runtime.played_sharding import (
    COPY_IN,
    GATHERS,
    SCATTERS,
    SUMS,
    ShardedDevice,
    ShardedStreams,
    play_sharding,
)
from tests.trainer_client.runtime.played_streams import (
    COMPUTING,
    ENCODERS,
    SENDING,
    StreamedTransport,
)
from tests.trainer_client.runtime.random_steps import (
    make_model,
    make_shard,
    random_plan,
    random_samples,
    single_process,
    whole,
    worst_difference,
    wrapped,
)
from trainer_client.runtime import GroupPool, encoder_stream, group_pool, run_step
from trainer_client.runtime import step as step_module

CPU = torch.device("cpu")


def played_steps(rank, size, cases):
    """Of each case, whose step is run twice: faults, what each stream did, and the step's error."""
    streams = ShardedStreams()
    play_sharding(streams)
    make = group_pool.make_transport
    group_pool.make_transport = lambda *given: StreamedTransport(make(*given), streams)
    beside = encoder_stream.EncoderStream(CPU)
    step_module.encoder_stream_of = lambda device: beside
    return {case: two_steps(rank, size, streams, *case) for case in cases}


def two_steps(rank, size, streams, how, seed, frozen, ahead, deaf=None):
    streams.faults, streams.deaf = [], deaf
    streams.operations.clear()
    samples = random_samples(seed)
    shard = make_shard(samples, random_plan(samples, size, (1, 2, 3), seed), size, rank, seed)
    model = wrapped(how, frozen)
    for parameter in model.parameters():
        streams.hold(parameter.to_local())
    with GroupPool(timeout_s=60, lane=f"{how} {seed} {ahead} {deaf}") as pool:
        for _ in range(2):
            model.zero_grad()
            with ShardedDevice(streams):
                result = run_step(model, shard, pool, features_ahead=ahead)
    error = worst_difference(result, whole(model), *single_process(make_model(frozen), samples))[1]
    return streams.faults, dict(streams.operations), error


KINDS = [
    ("fsdp", 13, ("vision",), True),
    ("fsdp", 13, ("vision",), False),
    ("fsdp", 11, (), True),
    ("hsdp", 13, ("vision",), True),
]


def test_sharded_models_are_in_order_on_one_computing_stream_with_features_ahead_or_not(world):
    for answers in world(played_steps, 4, KINDS).values():
        for case, (faults, operations, error) in answers.items():
            assert not faults, (case, faults[:3])
            used = {COMPUTING, COPY_IN, GATHERS, SCATTERS, SENDING}
            assert set(operations) == used | ({SUMS} if case[0] == "hsdp" else set())
            assert ENCODERS not in operations, "FSDP2's encoders stay on the computing stream"
            assert error <= 1e-10, case


DEAF = {
    COMPUTING: f"{COMPUTING} reads beside {GATHERS}",
    COPY_IN: f"{COPY_IN} takes memory that {COMPUTING} uses",
    SCATTERS: f"{SCATTERS} reads beside {COMPUTING}",
}


def test_a_stream_that_waits_for_nothing_is_found(world):
    cases = [(*KINDS[0], deaf) for deaf in DEAF]
    for answers in world(played_steps, 2, cases).values():
        for case, (faults, _, _) in answers.items():
            assert DEAF[case[-1]] in {what for what, _ in faults}
