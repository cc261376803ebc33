"""Augmented pictures: others in every epoch, the same for whoever decodes them, and refused where
the code changed."""

import json
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import yaml

from soak.processes import decoders
from soak.rank import row_of
from soak.service import ServiceProcess
from tests.cli.support import CommandLine, Done, says
from tests.service.small import IMAGES, make_corpus, write_job
from tests.service.support import Ranks, serving, wait_for
from trainer_client import ClientError

pytestmark = pytest.mark.long

EPOCHS = 4
CODE = '''
import numpy as np


class Noise:
    """Makes every picture lighter or darker by {strength} at most, pixel by pixel."""

    def augment(self, item, kind, rng):
        noise = rng.integers(-{strength}, {strength}, item.shape, dtype=np.int16)
        return np.clip(item + noise, 0, 255).astype(np.uint8)
'''


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A corpus, code and a config that allows it."""
    home = make_corpus(tmp_path / "corpus")
    monkeypatch.setenv("PYTHONPATH", str(written(home, 9).parent), prepend=":")
    (home / "config.yaml").write_text(
        yaml.safe_dump({"custom_processors": {"noise": "noise:Noise"}})
    )
    return home


@pytest.fixture
def run(home: Path, cli: CommandLine) -> Callable[..., Done]:
    """Run a command that must succeed and may import the code."""
    return partial(cli.ok, path=home / "code")


@pytest.fixture
def service(home: Path, tmp_path: Path, cli: CommandLine, run) -> Iterator[ServiceProcess]:
    """A service at which the job is registered: a step is an epoch of its pictures."""
    run("index", job_of(home), "--processes", "1", *config(home))
    with serving(tmp_path / "service", "local", *config(home)) as running:
        cli.service = running.address
        run("job", "submit", job_of(home))
        yield running


def config(home: Path) -> tuple[str, str]:
    return "--config", str(home / "config.yaml")


def written(home: Path, strength: int) -> Path:
    path = home / "code" / "noise.py"
    path.parent.mkdir(exist_ok=True)
    path.write_text(CODE.format(strength=strength))
    return path


def job_of(home: Path, *, augmented: bool = True, **changes: object) -> Path:
    plain = yaml.safe_load(write_job(home).read_text())
    more = {"augment": [{"name": "noise"}]} if augmented else {}
    return write_job(
        home,
        sources=plain["sources"][:1],
        pipeline={**plain["pipeline"], **more},
        batch={"samples": IMAGES},
        **{"epochs": EPOCHS, **changes},
    )


def pictures_of(ranks: Ranks) -> list[Counter[str]]:
    """Digests of the pictures that the ranks got, by step."""
    found: dict[int, Counter[str]] = {}
    for shard in (shard for shards in ranks.shards.values() for shard in shards):
        row = row_of(shard, launch=0, world_size=ranks.world_size)
        found.setdefault(shard.step, Counter()).update(row.items)
    return [found[step] for step in sorted(found)]


def test_epochs_differ_and_world_sizes_workers_and_replays_do_not(home, service, run):
    two = Ranks(service.address, 2).start().join()
    seen = pictures_of(two)
    assert [each.total() for each in seen] == EPOCHS * [IMAGES]
    assert len(set().union(*seen)) == EPOCHS * IMAGES, "no picture twice"
    same = json.loads(
        run("job", "replay", "job", "--steps", f"0-{EPOCHS - 1}", "--content", "--json").out
    )
    assert (same["content_compared"], same["differing"]) == (True, [])
    run("job", "delete", "job")
    run("workers", "restart")
    run("job", "submit", job_of(home))
    assert pictures_of(Ranks(service.address, 3).start().join()) == seen
    run("job", "delete", "job")
    run("job", "submit", job_of(home, augmented=False))  # by the same index
    plain = pictures_of(Ranks(service.address, 2).start().join())
    assert plain == EPOCHS * [plain[0]]
    assert not set(plain[0]) & set().union(*seen)


def test_workers_refuse_augmentation_that_was_replaced_under_a_running_job(home, service, run):
    run("job", "submit", job_of(home, epochs=50, ready_steps=1))
    ranks = Ranks(service.address, 1, hold_at=0).start()
    wait_for(lambda: ranks.held)
    written(home, 90)
    for decoder in decoders(service.home):
        decoder.kill()
    ranks.release()
    with pytest.raises(ClientError, match=r"the augment .*is not what the job was opened with"):
        ranks.join()


def test_other_augmentation_is_refused_where_a_checkpoint_goes_on(home, service, run, cli):
    ranks = Ranks(service.address, 2).start(stop_after=2).join()
    written(home, 90)
    run("workers", "restart")
    with pytest.raises(ClientError, match=r"augmentation of job 'job' is not what it was regist"):
        Ranks(service.address, 2).start(state=ranks.state).join()
    refused = cli("job", "submit", job_of(home))
    assert refused.code != 0
    says(refused.said, "augmentation of job 'job'", "under another name")
    written(home, 9)
    run("workers", "restart")
    Ranks(service.address, 2).start(state=ranks.state).join()


def test_the_preview_shows_pictures_as_the_epoch_changes_them(home, run, tmp_path):
    shown = []
    for epoch in (0, 1, 0):
        page = tmp_path / "page.html"
        run("preview", job_of(home), "--epoch", epoch, "--out", page, *config(home))
        shown.append(page.read_text())
    assert shown[0] == shown[2] != shown[1]
    says(shown[0], "augmented; below it what it was")
    assert shown[0].count("<img") == 2
    said = run("preview", job_of(home), *config(home)).said
    says(said, "tokens, augmented")
    said = run("preview", job_of(home, augmented=False)).said
    assert "augmented" not in said
