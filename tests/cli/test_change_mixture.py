"""Weights changed while ranks train on a real service, over a kill and on other world sizes."""

import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.support import CommandLine, says
from tests.service.small import CLIPS, IMAGES, TEXTS, indexed_job, make_corpus
from tests.service.support import Ranks, ServiceProcess, serving

pytestmark = pytest.mark.long
EPOCHS = 6
HELD = {"images": IMAGES, "clips": CLIPS, "texts": TEXTS}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return indexed_job(make_corpus(tmp_path / "corpus"), epochs=EPOCHS, batch={"samples": 6})


@pytest.fixture
def service(tmp_path: Path) -> Iterator[ServiceProcess]:
    with serving(tmp_path / "service") as running:
        yield running


def drawn(cli: CommandLine, service: ServiceProcess, steps: int) -> list[Counter[str]]:
    """The samples of each source in each of these steps, as `explain` plans them again."""
    found = []
    for step in range(steps):
        at = ("--step", str(step), "--service", service.address, "--json")
        keys = json.loads(cli.ok("explain", "job", *at).out)["samples"]
        found.append(Counter(key.partition("/")[0] for key in keys))
    return found


def test_a_source_is_left_out_from_a_step_on_and_comes_back(
    cli: CommandLine, file: Path, service: ServiceProcess
) -> None:
    at = ("--service", service.address)
    cli.ok("job", "submit", file, *at)
    ranks = Ranks(service.address, 2).start(stop_after=3).join()
    said = cli.ok("job", "mixture", "job", "--weight", "texts=0", *at).said
    first = int(re.search(r"draws by these weights from step (\d+) on", said).group(1))  # type: ignore[union-attr]
    says(said, f"from step {first}: texts 0")
    for more, why in (
        (("--weight", "texts"), "give each source once, with a number"),
        (("--weight", "strange=1"), "names the source 'strange'; the job's are"),
        (("--from-step", "9"), "give --weight SOURCE=WEIGHT too"),
    ):
        says(cli.refused("job", "mixture", "job", *more, *at), why)

    back = first + 3
    told = json.loads(
        cli.ok(
            "job", "mixture", "job", "--weight", "texts=1", "--from-step", str(back), "--json", *at
        ).out
    )
    assert told["from_step"] == back
    weights = [change["weights"] for change in told["mixture"]["changes"]]
    assert weights == [{"texts": 0}, {"texts": 1}]
    service.kill()
    service.start()
    whole = Ranks(service.address, 3).start(state=ranks.state).join()
    says(cli.ok("job", "show", "job", *at).said, f"from step {first}: texts 0 from step {back}")

    steps = whole.steps_done
    by_step = drawn(cli, service, steps)
    in_all = sum(by_step, Counter())
    assert not any(by_step[step]["texts"] for step in range(first, back))
    assert all(by_step[step]["texts"] for step in (first - 1, back))
    assert {name: in_all[name] for name in ("images", "clips")} == {
        name: EPOCHS * HELD[name] for name in ("images", "clips")
    }
    assert in_all["texts"] < EPOCHS * TEXTS
    (health,) = json.loads(cli.ok("status", "job", "--json", *at).out)["jobs"]
    progress = {each["source"]: each["drawn"] for each in health["progress"]["sources"]}
    assert progress == dict(in_all)
