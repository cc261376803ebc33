"""What hostile job files of one team cost another: `python -m benchmarks.wedge --out FILE`.

One team trains, its ranks as fast as data come. In turns of 50 steps the other team either does
nothing, or submits a job every few seconds whose chat template loops for ever or asks for
gigabytes. Both kinds of turns are of one run of one service, so their ratio is of the same hour.
"""

import argparse
import contextlib
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import yaml

from benchmarks.harness import hardware, judged
from dataservice.core.errors import ServiceError
from dataservice.jobs.indexing import index_job
from dataservice.jobs.job_file import read_job
from dataservice.operate.tokens_file import make_token
from dataservice.serving.client_access import Access
from dataservice.serving.coordinator_client import CoordinatorClient
from demo.corpus import make_corpus
from demo.tokenizer import train_tokenizer
from soak.service import ServiceProcess
from trainer_client import ShardDataset

HONEST, HOSTILE = "honest", "hostile"
LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
LARGE = "{% set a = 'a' * 3000000000 %}{{ a }}"
TURN_STEPS = 50
TURNS = 8
EVERY_S = 3.0
MOST_OUTSTANDING = 16
BAR = 1.2


def main() -> None:
    """Measure, and write what came out."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="a Markdown file for the figures")
    parser.add_argument("--pool", default="ray", choices=["ray", "local"])
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        text = measured(Path(folder), given.pool)
    print(text)
    if given.out is not None:
        given.out.write_text(text)


def measured(home: Path, pool: str) -> str:
    """The figures as Markdown."""
    tokens = set_up(home)
    service = ServiceProcess(
        home=home / "service", pool=pool, flags=("--config", str(home / "config.yaml"))
    )
    service.home.mkdir()
    service.start()
    try:
        with client(service, tokens[HONEST]) as honest:
            honest.submit((home / HONEST / "job.yaml").read_text(), str(home / HONEST))
        return told(*trained(home, service, tokens), pool)
    finally:
        service.end()


def set_up(home: Path) -> dict[str, str]:
    """Corpora, tokens and the service's config; the token of each team."""
    tokens, entries = {}, []
    for team in (HONEST, HOSTILE):
        tokens[team], record = make_token(team=team, role="team", name=team)
        entries.append(record.model_dump(mode="json", exclude_none=True))
    (home / "tokens.yaml").write_text(yaml.safe_dump(entries))
    config = {"tokens_file": str(home / "tokens.yaml"), "allowed_roots": [str(home / "{team}")]}
    (home / "config.yaml").write_text(yaml.safe_dump(config))
    make_corpus(home / HONEST / "corpus", seed=1, scale=0.12)
    train_tokenizer(home / HONEST / "corpus", home / HONEST / "tokenizer")
    plain = yaml.safe_load(Path("demo/job.yaml").read_text())
    plain.update({"job": "job", "batch": {"samples": 8}, "epochs": 1000})
    plain["plan"]["memory_tokens"] = 8192
    (home / HONEST / "job.yaml").write_text(yaml.safe_dump(plain))
    index_job(read_job(yaml.safe_dump(plain), home / HONEST), custom_processors={})
    (home / HOSTILE).mkdir()
    shutil.copytree(home / HONEST / "tokenizer", home / HOSTILE / "tokenizer")
    for name, template in (("loops", LOOPS), ("large", LARGE)):
        (home / HOSTILE / f"{name}.jinja").write_text(template)
        hostile: dict[str, Any] = {**plain, "job": name}
        hostile["pipeline"] = {"tokenizer": "tokenizer", "chat_template": f"{name}.jinja"}
        (home / HOSTILE / f"{name}.yaml").write_text(yaml.safe_dump(hostile))
    return tokens


def client(service: ServiceProcess, token: str) -> CoordinatorClient:
    """What the command line asks, as a team."""
    return CoordinatorClient(service.address, access=Access(token=lambda: token))


def trained(
    home: Path, service: ServiceProcess, tokens: dict[str, str]
) -> tuple[dict[bool, list[float]], int, int]:
    """Seconds of each step by whether the other team attacked, how many attacks were refused,
    and the most that the coordinator's process held."""
    seconds: dict[bool, list[float]] = {False: [], True: []}
    refusals: list[str] = []
    process, most_bytes = psutil.Process(service.pid), 0
    with ShardDataset(
        service.address, job="job", rank=0, world_size=1, token=tokens[HONEST]
    ) as dataset:
        steps = iter(dataset)
        for _ in range(TURN_STEPS):  # the first of all are slow
            dataset.commit(next(steps).step)
        for turn in range(TURNS):
            attacked = bool(turn % 2)
            wait_for_openers(process)
            with attack(home, service, tokens[HOSTILE], refusals, on=attacked):
                for _ in range(TURN_STEPS):
                    began_s = time.perf_counter()
                    dataset.commit(next(steps).step)
                    seconds[attacked].append(time.perf_counter() - began_s)
                most_bytes = max(most_bytes, process.memory_info().rss)
    return seconds, len(refusals), most_bytes


def wait_for_openers(service: psutil.Process) -> None:
    """Until what the last turn submitted has been refused."""
    while True:
        names = []
        for child in service.children(recursive=True):
            with contextlib.suppress(psutil.Error):
                names.append(child.name())
        if "opener" not in names:
            return
        time.sleep(0.2)


@contextmanager
def attack(
    home: Path, service: ServiceProcess, token: str, refusals: list[str], *, on: bool
) -> Iterator[None]:
    """Hostile submissions while the body runs."""
    over = threading.Event()
    outstanding = threading.Semaphore(MOST_OUTSTANDING)

    def submit(path: Path) -> None:
        try:
            with client(service, token) as hostile:
                hostile.submit(path.read_text(), str(path.parent))
        except ServiceError as error:
            refusals.append(str(error))
        finally:
            outstanding.release()

    def keep_on() -> None:
        number = 0
        while not over.wait(EVERY_S if number else 0.0):
            number += 1
            path = home / HOSTILE / f"{('loops', 'large')[number % 2]}.yaml"
            if outstanding.acquire(blocking=False):
                threading.Thread(target=submit, args=(path,), daemon=True).start()

    thread = threading.Thread(target=keep_on, daemon=True)
    if on:
        thread.start()
        time.sleep(EVERY_S / 2)
    yield
    over.set()
    if on:
        thread.join()


def told(seconds: dict[bool, list[float]], refusals: int, most_bytes: int, pool: str) -> str:
    """Both kinds of turns side by side."""
    rows = []
    for attacked, name in ((False, "undisturbed"), (True, "hostile jobs submitted")):
        p50, p90, p99 = np.quantile(seconds[attacked], (0.5, 0.9, 0.99)) * 1e3
        rows.append(f"| {name} | {len(seconds[attacked])} | {p50:.1f} | {p90:.1f} | {p99:.1f} |")
    ratio = float(np.median(seconds[True]) / np.median(seconds[False]))
    return "\n".join(
        [
            "# Hostile job files beside another team's training",
            "",
            f"`python -m benchmarks.wedge --pool {pool}`, {hardware()}",
            "",
            "One rank that only fetches and commits; the other team submits a job every "
            f"{EVERY_S:g} s whose chat template loops for ever or asks for gigabytes. Turns of "
            f"{TURN_STEPS} steps alternate in one run.",
            "",
            "| turns | steps | step p50, ms | p90 | p99 |",
            "|---|---|---|---|---|",
            *rows,
            "",
            f"Median of attacked over undisturbed steps: **{ratio:.2f}** (bar ≤ {BAR}: "
            f"{judged(ratio <= BAR)}). "
            f"{refusals} hostile jobs were refused meanwhile. The coordinator's process held at "
            f"most {most_bytes / 2**20:,.0f} MiB.",
            "",
        ]
    )


if __name__ == "__main__":
    main()
