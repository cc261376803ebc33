"""A rank's questions go along one call while it lasts, by calls of their own where they must."""


def steps_of(service) -> list[int]:
    return [shard.step for shard in service.dataset()]


def test_one_call_takes_all_questions(make_service):
    service = make_service(steps=6)
    assert steps_of(service) == list(range(6))
    assert service.coordinator.calls == 1


def test_a_service_that_knows_no_such_call_is_asked_step_by_step(make_service):
    service = make_service(steps=6)
    service.coordinator.streams = False
    assert steps_of(service) == list(range(6))
    assert service.coordinator.calls == 1, "it is tried once"


def test_after_a_refusal_in_passing_the_next_question_opens_another_call(make_service):
    service = make_service(steps=6)
    service.fail("GetShard", "UNAVAILABLE", "busy")
    assert steps_of(service) == list(range(6))
    assert service.coordinator.calls == 2


def test_a_call_that_was_ended_without_a_reason_loses_no_step(make_service):
    service = make_service(steps=6)
    service.coordinator.questions_a_call = 2
    assert steps_of(service) == list(range(6))
    assert [ask.step for ask in service.coordinator.asks] == list(range(7))
