"""`make demo`: from raw media to balanced training steps, on one machine, in a few minutes.

    corpus → tokenizer → index → serve → submit → train ──kill──► resume → audit and report

Everything is real: files of real codecs, a service in its own process with Ray workers, and four
trainer ranks under torchrun, which SIGKILL ends half way through. Exits non-zero when a promise of
the design is broken.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from demo import report
from demo.corpus import make_corpus, summary_table
from demo.tokenizer import train_tokenizer

ROOT = Path(__file__).resolve().parent.parent
RANKS = 4
JOB = "demo"
STEPS_PER_CHECKPOINT = 4
# What lies in the folder of a demo.
MADE = {"corpus", "tokenizer", "job.yaml", "index", "service.log", "state", "train"}
SERVICE_START_S = 120.0
TRAINING_LIMIT_S = 600.0

console = Console()


def main() -> None:
    """Run the demo in `.demo/`, or in the folder given."""
    home = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / ".demo").absolute()
    started_s = time.monotonic()
    prepare(home)
    job_file = home / "job.yaml"
    step("index the sources, from headers and text alone")
    cli("index", str(job_file))
    with service(home) as address:
        step("register the job")
        cli("job", "submit", str(job_file), "--service", address)
        steps = report.steps_of_epoch(job_file)
        step(f"train on {RANKS} ranks, and kill them all half way through {steps} steps")
        train_until(home, address, steps // 2)
        step("resume from the checkpoint and finish the epoch")
        train(home, address, resume=True)
        step("explain one step")
        cli("explain", JOB, "--step", "3", "--service", address)
        cli("status", "--service", address)
    step("what happened, and what balancing gave")
    broken = report.print_report(home, job_file, console)
    console.print(f"took {time.monotonic() - started_s:.0f} s", highlight=False)
    if broken:
        for line in broken:
            console.print(f"[bold red]broken:[/] {line}")
        raise SystemExit(1)
    console.print("[bold green]every promise held[/]")


def step(title: str) -> None:
    """Announce a stage of the demo."""
    console.rule(f"[bold]{title}")


def prepare(home: Path) -> None:
    """A fresh corpus, tokenizer and job file, in place of those of an earlier demo."""
    if home.exists() and not (home.is_dir() and set(os.listdir(home)) <= MADE):
        raise SystemExit(f"{home} holds other files than a demo's; give a folder for it alone")
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir(parents=True)
    step("make a corpus of real media")
    with Progress(console=console, transient=True) as bars:
        tasks = {}

        def tell(source: str, done: int, total: int) -> None:
            if source not in tasks:
                tasks[source] = bars.add_task(source, total=total)
            bars.update(tasks[source], completed=done)

        summary = make_corpus(home / "corpus", seed=0, progress=tell)
    console.print(summary_table(summary))
    train_tokenizer(home / "corpus", home / "tokenizer")
    shutil.copy(ROOT / "demo" / "job.yaml", home / "job.yaml")


def cli(*arguments: str) -> None:
    """Run `dataservice ...` as a person would."""
    subprocess.run(command(*arguments), check=True)


def command(*arguments: str) -> list[str]:
    """The command line of `dataservice ...` in this environment."""
    return [sys.executable, "-m", "dataservice.cli.main", *arguments]


@contextmanager
def service(home: Path) -> Iterator[str]:
    """Run `dataservice serve` in a separate process; gives its address, and stops it by SIGTERM at
    the end."""
    step("start the service with Ray workers")
    log = home / "service.log"
    arguments = ("serve", "--listen", "127.0.0.1:0", "--state-dir", str(home / "state"))
    with log.open("wb") as sink:
        process = subprocess.Popen(
            command(*arguments, "--workers", "2"), stdout=sink, stderr=subprocess.STDOUT
        )
    try:
        address = served_address(process, log)
        console.print(f"serving at {address}, log in {log}", highlight=False)
        yield address
    finally:
        process.send_signal(signal.SIGTERM)
        if (code := process.wait(timeout=60)) != 0:
            raise SystemExit(f"the service ended with {code}:\n{log.read_text()[-3000:]}")


def served_address(process: subprocess.Popen[bytes], log: Path) -> str:
    """Wait for the line that says where the service listens."""
    deadline_s = time.monotonic() + SERVICE_START_S
    while time.monotonic() < deadline_s and process.poll() is None:
        for line in log.read_text().splitlines():
            if line.startswith("serving at "):
                return line.split()[2]
        time.sleep(0.1)
    process.kill()
    raise SystemExit(f"the service did not start:\n{log.read_text()[-3000:]}")


def trainer(home: Path, address: str, *, resume: bool) -> subprocess.Popen[bytes]:
    """Four ranks under torchrun, in a process group of their own."""
    arguments = ["--service", address, "--job", JOB, "--out", str(home / "train")]
    arguments += ["--steps-per-checkpoint", str(STEPS_PER_CHECKPOINT)]
    arguments += ["--resume"] if resume else []
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return subprocess.Popen(
        [*torchrun, "--nproc-per-node", str(RANKS), "-m", "demo.train", *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )


def train(home: Path, address: str, *, resume: bool) -> None:
    """Train to the end of the epoch."""
    process = trainer(home, address, resume=resume)
    try:
        code = process.wait(timeout=TRAINING_LIMIT_S)
    except BaseException:
        kill(process)
        raise
    if code != 0:
        raise SystemExit(f"the trainers ended with {code}")


def train_until(home: Path, address: str, steps: int) -> None:
    """Train until `steps` steps are done, then kill every rank without warning."""
    process = trainer(home, address, resume=False)
    deadline_s = time.monotonic() + TRAINING_LIMIT_S
    try:
        while steps_done(home) < steps:
            if process.poll() is not None:
                raise SystemExit(f"the trainers ended early with {process.returncode}")
            if time.monotonic() > deadline_s:
                raise SystemExit(f"{steps} steps took more than {TRAINING_LIMIT_S:.0f} s")
            time.sleep(0.05)
    finally:
        kill(process)
    console.print(f"killed all ranks by SIGKILL after step {steps_done(home) - 1}")


def kill(process: subprocess.Popen[bytes]) -> None:
    """Send SIGKILL to torchrun and its ranks, all at once.

    torchrun gives each rank a session of its own, so the ranks are found as its children.
    """
    ranks = children(process.pid)
    for pid in (process.pid, *ranks):
        with suppress(ProcessLookupError):  # it has ended by itself
            os.kill(pid, signal.SIGKILL)
    process.wait()


def children(pid: int) -> list[int]:
    """Process ids of a process's children, from the kernel's own list."""
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for task in tasks for child in task.read_text().split()]


def steps_done(home: Path) -> int:
    """Number of steps that rank 0 has written to its log."""
    log = home / "train" / "rank0.jsonl"
    if not log.exists():
        return 0
    lines = [line for line in log.read_text().splitlines() if line.endswith("}")]
    return 1 + json.loads(lines[-1])["step"] if lines else 0


if __name__ == "__main__":
    main()
