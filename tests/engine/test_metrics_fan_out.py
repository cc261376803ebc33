"""Several listeners to the engine's events, one of which may fail."""

from dataservice.core.ports import NoMetrics
from dataservice.engine.metrics_fan_out import fan_out


class Heard(NoMetrics):
    def __init__(self) -> None:
        self.ready: list[tuple[str, int]] = []

    def ready_steps(self, job: str, steps: int) -> None:
        self.ready.append((job, steps))


class Failing(NoMetrics):
    def ready_steps(self, job: str, steps: int) -> None:
        raise ZeroDivisionError


def test_every_listener_is_told_though_one_before_it_fails(caplog):
    first, last = Heard(), Heard()
    events = fan_out(first, Failing(), last)
    events.ready_steps("job", 2)
    events.ready_steps("job", 3)
    assert first.ready == last.ready == [("job", 2), ("job", 3)]
    assert caplog.text.count("the event ready_steps could not be shown; training goes on") == 2
