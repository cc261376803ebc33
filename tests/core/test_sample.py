import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dataservice.core.sample import ItemLengths, LengthTable, Modality, SampleLengths

items = st.builds(
    ItemLengths,
    modality=st.sampled_from(Modality),
    encoder_tokens=st.integers(1, 500),
    llm_tokens=st.integers(1, 100),
    position=st.integers(0, 50),
    shape=st.just((1,)),
)
samples = st.lists(
    st.builds(
        SampleLengths,
        llm_tokens=st.integers(1, 900),
        loss_tokens=st.integers(0, 50),
        items=st.lists(items, max_size=4).map(tuple),
    ),
    min_size=1,
    max_size=8,
)


@given(samples, st.data())
def test_taking_rows_of_a_length_table_is_taking_the_samples(rows, data):
    chosen = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=10))
    taken = LengthTable.of(rows).take(np.array(chosen, dtype=np.int64))
    direct = LengthTable.of([rows[i] for i in chosen])
    for name in LengthTable.__dataclass_fields__:
        assert getattr(taken, name).tolist() == getattr(direct, name).tolist()


@given(samples)
def test_encoder_tokens_are_summed_by_modality(rows):
    table = LengthTable.of(rows)
    for modality in Modality:
        direct = [
            sum(i.encoder_tokens for i in row.items if i.modality == modality) for row in rows
        ]
        assert table.encoder_tokens(modality).tolist() == direct
