"""How often a step makes the host wait for the device: never for a microbatch.

The device is played (see ``fake_device.py``), also its clock, whose times are known only later.
"""

import pytest
import torch

from tests.trainer_client.runtime.fake_device import OF_A_NODE, THERE, FakeDevice
from tests.trainer_client.runtime.model_there import (
    IN_A_STEP,
    PlayedStream,
    connected_there,
    from_there,
    model_there,
    play_a_stream,
    play_a_transport,
)
from tests.trainer_client.runtime.random_steps import (
    make_model,
    make_shard,
    random_plan,
    random_samples,
    single_process,
    worst_difference,
)
from trainer_client.runtime import GroupPool, evaluate_step, run_step
from trainer_client.runtime.host_numbers import HostCopy
from trainer_client.runtime.phases import PHASES

THIS_FILE = "tests/trainer_client/runtime/test_host_waits.py"


def steps_there(rank, size, seeds):
    """For each seed: the microbatches, what waited in the step, and the error of the result."""
    play_a_stream()
    play_a_transport()
    return [one_step(rank, size, seed) for seed in seeds]


def one_step(rank, size, seed):
    samples = random_samples(seed)
    waves = random_plan(samples, size, (1, 2, 3), seed)
    shard = make_shard(samples, waves, size, rank, seed)
    with FakeDevice() as device, GroupPool(timeout_s=60, lane=str(seed)) as pool:
        connected_there(pool)
        model = model_there()
        on_device = shard.to(THERE)
        assert not device.reads
        device.copies.clear()
        result = run_step(model, on_device, pool, features_ahead=seed % 2 == 0)
        waited = list(device.reads)
        assert not device.copies
        device.reads.clear()
        assert result.loss == result.loss
        waited_for_loss = list(device.reads)
    loss, grads = single_process(make_model(()), samples)
    error = worst_difference(result, from_there(model), loss, grads)[1]
    degrees = {len(members) for wave in waves for members, _ in wave}
    return len(shard.microbatches), degrees, waited, waited_for_loss, error


def test_a_microbatch_never_makes_the_host_wait_for_the_device(world):
    for found in world(steps_there, 4, [2, 3, 5]).values():
        assert {1, 2, 3} <= set().union(*(degrees for _, degrees, *_ in found))
        assert len({microbatches for microbatches, *_ in found}) > 1
        for _, _, waited, waited_for_loss, error in found:
            assert waited == ["a copy to the host"] * IN_A_STEP
            assert waited_for_loss == ["a copy to the host"], "once, however often it is read"
            assert error <= 1e-10


def steps_after_one_another(rank, size):
    """Of two steps of which nobody reads anything: what waited, and how often a clock was read,
    which waits for its last moment."""
    play_a_stream()
    play_a_transport()
    samples, found = random_samples(2), []
    shard = make_shard(samples, random_plan(samples, size, (1, 2), 2), size, rank, 2)
    with FakeDevice() as device, GroupPool(timeout_s=60) as pool:
        connected_there(pool)
        for _ in range(2):
            model, on_device, read = model_there(), shard.to(THERE), PlayedStream.reads
            run_step(model, on_device, pool)
            found.append((len(device.reads), PlayedStream.reads - read))
            device.reads.clear()
    return found


def test_a_step_also_waits_until_the_one_before_it_is_over_whose_times_nobody_read(world):
    """The device has come that far when the plans are compared, which is waited for anyway."""
    for found in world(steps_after_one_another, 2).values():
        assert found == [(IN_A_STEP, 0), (IN_A_STEP, 1)]


def results_at_different_times(rank, size):
    """Replica 0 reads a step's phases at once, 1 after the next step, and 2 when all is closed."""
    play_a_stream()
    with GroupPool(timeout_s=60) as pool:
        results = []
        for seed in (1, 2, 3):
            samples = random_samples(seed)
            shard = make_shard(samples, random_plan(samples, size, (2, 3), seed), size, rank, seed)
            act = evaluate_step if seed == 2 else run_step
            results.append(act(make_model(()), shard, pool))
            if rank == 0:
                assert results[-1].phase_s is not None
            if rank == 1 and len(results) > 1:
                assert results[-2].phase_s is not None
    return [(dict(result.phase_s), result.seconds, result.loss) for result in results]


def test_times_that_are_known_later_are_compared_alike_whoever_reads_them_when(world):
    answers = world(results_at_different_times, 3)
    for by_step in zip(*answers.values(), strict=True):
        assert len({loss for *_, loss in by_step}) == 1
        for phase_s, seconds, _ in by_step:
            assert tuple(phase_s) == PHASES
            assert sum(phase_s.values()) == pytest.approx(seconds, rel=1e-9)
            assert min(phase_s.values()) >= 0


def reads(there):
    """Each way of reading a number on the host."""
    return {
        "item": lambda: there.sum().item(),
        "float": lambda: float(there.sum()),
        "bool": lambda: bool((there > 0).all()),
        "nonzero": lambda: there.nonzero(),
        "mask": lambda: there[there > 0],
        "copy": lambda: there.cpu(),
        "copy into": lambda: torch.zeros(3).copy_(there),
        "select": lambda: there.masked_select(there > 0),
        "equal": lambda: torch.equal(there, there),
        "list": lambda: there.tolist(),
        "unique": lambda: there.unique_consecutive(),
        "repeat": lambda: there.repeat_interleave(there.long()),
    }


@pytest.mark.parametrize("way", list(reads(None)))
def test_the_played_device_notes_every_way_of_reading_a_number(way):
    with FakeDevice() as device:
        there = torch.tensor([1.0, 0.0, 2.0]).to(THERE)
        sums = there + there.new_ones(3)
        assert sums.device == THERE
        assert not device.reads
        reads(there)[way]()
        assert len(device.reads) == 1


def copies(there):
    """Each way of giving it a number of the host and waiting until it has it."""
    return {
        "to": lambda: torch.zeros(3).to(THERE),
        "copy into": lambda: there.copy_(torch.zeros(3)),
        "tensor": lambda: torch.tensor([1.0], device=THERE),
        "new tensor": lambda: there.new_tensor([1.0]),
        "index": lambda: there[torch.tensor([0, 2])],
    }


@pytest.mark.parametrize("way", list(copies(None)))
def test_the_played_device_notes_every_way_of_waiting_for_a_number_to_arrive(way):
    with FakeDevice() as device:
        there = torch.zeros(3).to(THERE, non_blocking=True)
        there.copy_(torch.ones(3), non_blocking=True)
        assert there.repeat_interleave(there.long(), output_size=3).device == THERE
        assert not device.copies
        assert not device.reads
        copies(there)[way]()
        assert device.copies
        assert not device.reads


def waits_for(there):
    """Ways of waiting for the device, each for one file."""
    return {
        THIS_FILE: lambda: float(there.detach().sum()),
        # What torch reads for its caller.
        THIS_FILE + ", by torch": lambda: torch.nn.utils.clip_grad_norm_(
            there, 1.0, error_if_nonfinite=True
        ),
        "trainer_client/runtime/host_numbers.py": lambda: HostCopy(there.detach()).read(),
        OF_A_NODE: lambda: there.to("cpu", non_blocking=True).sum().backward(),
    }


@pytest.mark.parametrize("file", list(waits_for(None)))
def test_the_played_device_knows_for_which_file_it_is_waited(file):
    with FakeDevice() as device:
        there = torch.ones(3).to(THERE).requires_grad_()
        there.grad = torch.ones(3).to(THERE)
        device.copies.clear()
        waits_for(there)[file]()
        assert (*device.reads, *device.copies)[-1].by == file.split(",")[0]
