import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataservice.core.errors import SampleError
from dataservice.core.layout import locate, padded_tokens, sample_starts
from dataservice.core.orders import PackSample
from dataservice.core.sample import (
    DecodedSample,
    ItemLengths,
    Modality,
    SampleLengths,
    SampleLocation,
    SampleRef,
)
from dataservice.workers.pack import assemble, check_planned_shape, masked_sample

PAD = 7
REF = SampleRef(sample_id=0, source="s", key="k", location=SampleLocation(file="f"))
IMAGE = ItemLengths(
    modality=Modality.VISION, encoder_tokens=4, llm_tokens=1, position=1, shape=(1, 2, 2, 3)
)
SOUND = ItemLengths(
    modality=Modality.AUDIO, encoder_tokens=5, llm_tokens=2, position=2, shape=(16,)
)


def sample(tokens, items=()):
    return PackSample(
        ref=REF, lengths=SampleLengths(llm_tokens=tokens, loss_tokens=tokens, items=items)
    )


def decoded(tokens, first=100, items=()):
    ids = np.arange(first, first + tokens, dtype=np.int32)
    return DecodedSample(input_ids=ids, labels=ids + 1, items=items)


def test_a_pack_of_degree_one_is_its_samples_end_to_end():
    pack = assemble([sample(3), sample(2)], [decoded(3), decoded(2, 200)], degree=1, pad_token_id=7)
    (part,) = pack.members
    assert part["input_ids"].tolist() == [100, 101, 102, 200, 201]
    assert part["labels"].tolist() == [101, 102, 103, 201, 202]
    assert part["position_ids"].tolist() == [0, 1, 2, 0, 1]
    assert all(array.dtype == np.int32 for array in part.values())


def test_padding_is_the_pad_token_with_its_label_ignored():
    pack = assemble([sample(3)], [decoded(3)], degree=2, pad_token_id=PAD)
    assert pack.members[0]["input_ids"].tolist() == [100, PAD]
    assert pack.members[0]["labels"].tolist() == [101, -100]
    assert pack.members[1]["input_ids"].tolist() == [101, 102]
    assert pack.members[0]["position_ids"].tolist() == [0, 3]


@settings(deadline=None)
@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=6), degree=st.integers(1, 5))
def test_every_token_lies_where_the_layout_says(lengths, degree):
    samples = [sample(length) for length in lengths]
    arrays = [decoded(length, 1000 * (i + 1)) for i, length in enumerate(lengths)]
    pack = assemble(samples, arrays, degree=degree, pad_token_id=PAD)

    padded = padded_tokens(np.array(lengths), degree)
    starts = sample_starts(padded)
    for i, length in enumerate(lengths):
        where = np.arange(length)
        member, row = locate(
            where, np.full(length, padded[i]), np.full(length, degree), np.full(length, starts[i])
        )
        for position in range(length):
            part = pack.members[member[position]]
            assert part["input_ids"][row[position]] == 1000 * (i + 1) + position
            assert part["position_ids"][row[position]] == position
    real = sum(int((part["labels"] != -100).sum()) for part in pack.members)
    assert real == sum(lengths)


def test_items_come_in_sequence_order_then_item_order():
    items = [np.full((1, 2, 2, 3), value, dtype=np.uint8) for value in (1, 2, 3)]
    pack = assemble(
        [sample(2, (IMAGE, IMAGE)), sample(1, (IMAGE,))],
        [decoded(2, items=tuple(items[:2])), decoded(1, items=(items[2],))],
        degree=1,
        pad_token_id=PAD,
    )
    assert [item.flat[0] for item in pack.items] == [1, 2, 3]


def test_the_size_counts_every_member_and_item():
    image = np.zeros((1, 2, 2, 3), dtype=np.uint8)
    pack = assemble([sample(4, (IMAGE,))], [decoded(4, items=(image,))], degree=2, pad_token_id=0)
    assert pack.size_bytes == 3 * 4 * 4 + 12


def test_a_masked_sample_keeps_its_planned_shape_and_teaches_nothing():
    planned = SampleLengths(llm_tokens=5, loss_tokens=3, items=(IMAGE, SOUND))
    masked = masked_sample(planned, PAD)
    check_planned_shape(masked, planned)
    assert masked.input_ids.tolist() == [PAD] * 5
    assert masked.labels.tolist() == [-100] * 5
    assert [item.dtype for item in masked.items] == [np.uint8, np.float32]
    assert not any(item.any() for item in masked.items)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (decoded(4), r"int32\[4\] where int32\[5\]"),
        (DecodedSample(input_ids=np.zeros(5, np.int32), labels=np.zeros(4, np.int32)), "labels"),
        (decoded(5), "0 media items where 1"),
        (decoded(5, items=(np.zeros((1, 2, 2, 3), np.float32),)), "media item 0 .* float32"),
        (decoded(5, items=(np.zeros((1, 2, 4, 3), np.uint8),)), r"uint8\[1, 2, 4, 3\]"),
    ],
)
def test_a_sample_that_misses_its_planned_shape_is_refused(wrong, message):
    with pytest.raises(SampleError, match=message):
        check_planned_shape(wrong, SampleLengths(llm_tokens=5, loss_tokens=5, items=(IMAGE,)))


def digests(pack):
    return [pack.sample_digests[i : i + 8] for i in range(0, len(pack.sample_digests), 8)]


def test_a_sample_has_one_digest_whatever_pack_it_is_in():
    pixels = np.arange(12, dtype=np.uint8).reshape(IMAGE.shape)
    first, second = decoded(3, items=(pixels,)), decoded(2, 200)
    lengths = [sample(3, (IMAGE,)), sample(2)]
    one, other = digests(assemble(lengths, [first, second], degree=1, pad_token_id=PAD))
    assert len(one) == len(other) == 8
    assert one != other
    for degree in (1, 2, 3):
        pack = assemble(lengths[::-1], [second, first], degree=degree, pad_token_id=PAD)
        assert digests(pack) == [other, one]
    strided = decoded(3, items=(np.asfortranarray(pixels),))
    assert digests(assemble(lengths[:1], [strided], degree=1, pad_token_id=PAD)) == [one]


def test_every_token_and_every_byte_counts():
    pixels = np.arange(12, dtype=np.uint8).reshape(IMAGE.shape)
    sound = np.linspace(-1, 1, 16, dtype=np.float32)
    lengths = [sample(3, (IMAGE, SOUND))]
    wrong = [decoded(3, items=(pixels, sound)) for _ in range(5)]
    wrong[1].input_ids[2] += 1
    wrong[2].labels[0] = -100
    wrong[3] = decoded(3, items=(pixels.copy(), sound))
    wrong[3].items[0][0, 1, 1, 2] ^= 1
    wrong[4] = decoded(3, items=(pixels, np.nextafter(sound, np.float32(2))))
    found = {assemble(lengths, [each], degree=1, pad_token_id=PAD).sample_digests for each in wrong}
    padded = assemble(lengths, [wrong[0]], degree=1, pad_token_id=PAD + 1).sample_digests
    assert len({*found, padded}) == 6
