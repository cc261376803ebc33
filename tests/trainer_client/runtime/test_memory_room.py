"""Encoders that train go a wave ahead where every replica has room for it, and nowhere else."""

import pytest
import torch

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
from trainer_client.runtime import GroupPool, memory_room, run_step
from trainer_client.runtime.memory_room import FILLED, MemoryRoom

BOTH = ("vision", "audio")
KEPT = 10  # bytes that encoders of the played device keep for a number


class PlayedMemory:
    """A device whose tensors are told."""

    def __init__(self, usable):
        self._usable, self.now, self.most, self.asked = usable, 0, 0, 0

    def hold(self, size):
        self.now += size
        self.most = max(self.most, self.now)

    def held(self):
        return self.now

    def peak(self):
        return self.most

    def usable(self):
        self.asked += 1
        return self._usable


def a_shard(seed=6):
    samples = random_samples(seed)
    return make_shard(samples, random_plan(samples, 1, (1,), seed), 1, 0, seed)


def batches_of(microbatch):
    found = {modality: getattr(microbatch, modality) for modality in BOTH}
    return {modality: batch for modality, batch in found.items() if batch is not None}


def kept_by(microbatch):
    return KEPT * sum(batch.item_numbers for batch in batches_of(microbatch).values())


def play_step(room, memory, shard, *, ahead, decoder):
    """Encode, decode, go back, wave by wave; so many bytes live in a decoder."""
    held = {}
    waves = len(shard.microbatches)
    for place in range(waves):
        for number in range(place, min(place + 1 + ahead, waves)):
            if number not in held:
                held[number] = kept_by(shard.microbatches[number])
                for modality, batch in batches_of(shard.microbatches[number]).items():
                    with room.encoding(modality, batch):
                        memory.hold(KEPT * batch.item_numbers)
        memory.hold(decoder)
        memory.hold(-decoder - held.pop(place))
        assert memory.now >= 0
    room.end(ahead=ahead)


def played(monkeypatch, usable):
    memory = PlayedMemory(usable)
    monkeypatch.setattr(memory_room, "memory_of", lambda device: memory)
    return MemoryRoom(), memory


def need_of(shard):
    return max(kept_by(microbatch) for microbatch in shard.microbatches[1:])


@pytest.mark.parametrize("short", [0, 1])
def test_there_is_room_to_the_last_byte_of_what_may_be_filled(monkeypatch, short):
    shard, decoder = a_shard(), 5000
    first = max(kept_by(microbatch) for microbatch in shard.microbatches) + decoder
    needed = first + need_of(shard)
    room, memory = played(monkeypatch, (needed - short) / FILLED + 0.01)
    assert not room.begin(None, shard.planned), "nothing is known of the first step"
    play_step(room, memory, shard, ahead=False, decoder=decoder)
    assert room.begin(None, shard.planned) == (short == 0)


def test_what_is_held_between_steps_counts_such_as_optimizer_states(monkeypatch):
    shard = a_shard()
    room, memory = played(monkeypatch, 100_000)
    room.begin(None, shard.planned)
    play_step(room, memory, shard, ahead=False, decoder=1000)
    assert room.begin(None, shard.planned)
    play_step(room, memory, shard, ahead=True, decoder=1000)
    memory.hold(89_500)
    assert not room.begin(None, shard.planned)
    memory.hold(-89_500)
    assert room.begin(None, shard.planned)
    assert memory.asked == 1, "the driver is asked once"


def test_a_step_that_went_ahead_tells_what_it_took_without_that(monkeypatch):
    """Else a step would be refused for what it took ahead, and every second would go ahead."""
    shard, decoder = a_shard(), 3000
    base = max(kept_by(microbatch) for microbatch in shard.microbatches) + decoder
    room, memory = played(monkeypatch, (base + need_of(shard)) / FILLED + 1)
    answers = []
    for _ in range(5):
        ahead = room.begin(None, shard.planned)
        answers.append(ahead)
        play_step(room, memory, shard, ahead=ahead, decoder=decoder)
    assert answers == [False, True, True, True, True]
    assert memory.most <= FILLED * memory.usable()
    ahead = room.begin(None, shard.planned)
    play_step(room, memory, shard, ahead=ahead, decoder=2 * decoder)
    assert not room.begin(None, shard.planned), "a larger decoder was seen while ahead"


def test_a_modality_that_was_not_seen_yet_is_not_guessed(monkeypatch):
    shard = a_shard()
    room, memory = played(monkeypatch, 1e12)
    room.begin(None, [])
    room.end(ahead=False)
    assert any(kept_by(microbatch) for microbatch in shard.microbatches[1:])
    assert not room.begin(None, shard.planned)
    play_step(room, memory, shard, ahead=False, decoder=1)
    assert room.begin(None, shard.planned)


def test_a_device_that_counts_no_memory_has_no_room():
    room, shard = MemoryRoom(), a_shard()
    for _ in range(3):
        assert not room.begin(torch.device("cpu"), shard.planned)
        room.end(ahead=False)


def steps_with_room(rank, size, how, frozen, has_room):
    """Per step: whether replicas went ahead, and the difference to one process.

    ``has_room``: by step, the ranks that say that they have."""
    said = iter(has_room)
    MemoryRoom.begin = lambda room, device, planned: rank in next(said)
    found = []
    with GroupPool(timeout_s=60) as pool:
        for seed in (11, 13) * (len(has_room) // 2):
            samples = random_samples(seed)
            shard = make_shard(
                samples, random_plan(samples, size, (1, 2, 3), seed), size, rank, seed
            )
            model = wrapped(how, frozen)
            inner = model.module if how == "ddp" else model
            order, decode, encode = [], inner.decode, inner.encode
            inner.decode = lambda *given, f=decode, o=order: (o.append("decode"), f(*given))[1]
            inner.encode = lambda *given, f=encode, o=order: (o.append("encode"), f(*given))[1]
            result = run_step(model, shard, pool)
            before = order[: order.index("decode")].count("encode")
            first = sum(getattr(shard.microbatches[0], each) is not None for each in BOTH)
            loss, grads = single_process(make_model(frozen), samples)
            error = worst_difference(result, whole(model), loss, grads)
            found.append((before > first, error))
    return found


@pytest.mark.parametrize(
    "how", ["plain", *(pytest.param(how, marks=pytest.mark.long) for how in ("fsdp", "ddp"))]
)
def test_all_replicas_go_ahead_or_none_and_gradients_are_the_same(world, how):
    everyone, some = {0, 1, 2, 3}, {0, 2, 3}
    answers = world(steps_with_room, 4, how, (), [set(), everyone, some, everyone])
    for found in answers.values():
        assert [ahead for ahead, _ in found] == [False, True, False, True]
        for _, (parameter, difference) in found:
            assert difference <= 1e-10, parameter
