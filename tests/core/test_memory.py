"""Bytes of a rank by phase (DHP eq. 7), and the tokens that they leave."""

import pytest

from dataservice.core.errors import PlanningError
from dataservice.core.memory import MemoryModel
from dataservice.core.plan_options import PlanOptions
from dataservice.core.topology import ReplicaLayout

GIB = 2.0**30
MODEL = MemoryModel(
    budget_bytes=70 * GIB,
    states_bytes=30 * GIB,
    llm_token_bytes=2.0**20,
    vision_token_bytes=2.0**16,
)


def layout(stages: int, virtual_stages: int = 1, encoder_stage: str = "first") -> ReplicaLayout:
    return ReplicaLayout(
        ranks_per_replica=stages,
        pipeline_stages=stages,
        virtual_stages=virtual_stages,
        encoder_stage=encoder_stage,
    )


def text_alone(**changes: float) -> MemoryModel:
    return MemoryModel(**{**MODEL.to_dict(), "vision_token_bytes": 0.0, **changes})


def test_the_simple_form_is_what_the_states_leave_over_the_bytes_of_a_token():
    assert MODEL.tokens(layout(1)) == 40 * 1024


def test_a_pipeline_keeps_as_many_microbatches_as_it_has_stages():
    assert MODEL.tokens(layout(4)) == 10 * 1024


def test_an_interleaved_one_keeps_parts_of_them_and_whole_ones_of_what_was_encoded():
    assert layout(4, 2).kept_microbatches == 5.5
    assert text_alone().tokens(layout(4, 2)) == int(40 * 1024 / 5.5)
    assert MODEL.tokens(layout(4, 2)) == 40 * 1024 // 8


def test_options_take_the_tokens_from_the_bytes_and_keep_those_they_were_given():
    assert PlanOptions(memory=MODEL).over(layout(4)).memory_tokens == 10 * 1024
    assert PlanOptions(memory_tokens=77).over(layout(4)).memory_tokens == 77


def test_a_model_comes_back_from_its_dictionary():
    assert MemoryModel.from_dict(MODEL.to_dict()) == MODEL
    with pytest.raises(PlanningError, match=r"numbers of bytes under budget_bytes"):
        MemoryModel.from_dict({"budget": 1.0})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"budget_bytes": float("nan")}, "budget_bytes is nan; bytes are finite"),
        ({"vision_token_bytes": -1.0}, "vision_token_bytes is -1.0; bytes are finite"),
        ({"llm_token_bytes": 0.0}, "a token keeps more than 0 bytes"),
        ({"states_bytes": 80 * GIB}, "no room for one token .* Raise budget_bytes"),
    ],
)
def test_bytes_that_cannot_be_are_refused_with_what_to_do(changes, said):
    with pytest.raises(PlanningError, match=said):
        MemoryModel(**{**MODEL.to_dict(), **changes})


def test_a_pipeline_that_leaves_no_token_is_refused():
    tight = text_alone(budget_bytes=30 * GIB + 2.0**21)
    assert tight.tokens(layout(2)) == 1
    with pytest.raises(PlanningError, match=r"less than one token .* fewer pipeline stages"):
        tight.tokens(layout(4))


def test_encoders_of_a_whole_step_at_once_have_no_limit_by_microbatch():
    with pytest.raises(PlanningError, match=r"encoder_stage is spread.*encoder_stage to first"):
        MODEL.tokens(layout(2, encoder_stage="spread"))
    assert text_alone().tokens(layout(2, encoder_stage="spread")) == 20 * 1024


def test_options_without_either_form_are_refused():
    with pytest.raises(PlanningError, match=r"memory_tokens is 0.*or plan\.memory in bytes"):
        PlanOptions()
