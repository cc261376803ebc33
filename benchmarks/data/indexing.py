"""What an index costs beside Energon's: `python -m benchmarks.data.indexing --out FILE`, minutes.

JPEGs of 1.5 megapixels with captions, in tars, are indexed by `dataservice index`, which opens
every picture, counts the tokens of every caption and sums all bytes; and by Megatron-Energon's
`prepare`, which lists the files of the tars, and with `--media-metadata-by-extension` opens
pictures too. One JSONL of documents is indexed by one process and by two. All take turns; what is
counted are whole commands, with what they load. Energon has an environment of its own, and is left
out where that does not install.
"""

import argparse
import json
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import yaml

from benchmarks.data.corpus import make_corpus
from benchmarks.data.measured import environment
from benchmarks.harness import hardware, judged, publish
from soak.service import ROOT, child_environment

ENERGON = ("megatron-energon==7.4.1", "torch==2.13.0", "pillow")
PREPARE = (
    "--non-interactive", "--split-ratio", "1,0,0", "--sample-type", "CaptioningSample",
    "--field-map", '{"image": "jpg", "caption": "txt"}', "--no-progress",
)  # fmt: skip
NAMES = {
    "ours": "`dataservice index --processes 1`",
    "prepare": "`energon prepare --num-workers 1`",
    "pictures": "the same with `--media-metadata-by-extension`",
}
JSONL_BYTES = 84_000_000
WORDS = 350  # of a document, about 2 KB
JSONL_BAR = 1.8


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.data.indexing", description=__doc__)
    parser.add_argument("--out", type=Path, help="write the tables to this file as well")
    parser.add_argument("--pictures", type=int, default=5000)
    parser.add_argument("--jsonl-bytes", type=int, default=JSONL_BYTES)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir()) / "bench-data")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-indexing-") as folder:
        home = Path(folder)
        make_corpus(home, given.pictures)
        tars_s = of_tars_s(home, environment(given.cache, ENERGON), given.rounds)
        jsonl_s = of_jsonl_s(home, given.jsonl_bytes, given.rounds)
    publish(to_markdown(given, tars_s, jsonl_s), given.out)


def of_tars_s(home: Path, energon: Path | None, rounds: int) -> dict[str, list[float]]:
    """Seconds of the processor of each command, in turns."""
    job = home / "job.yaml"
    commands = {"ours": [*_dataservice(job), "--processes", "1"]}
    if energon is not None:
        plain = [str(energon.parent / "energon"), "prepare", *PREPARE, "--num-workers", "1"]
        commands["prepare"] = [*plain, str(home / "tars")]
        commands["pictures"] = [*plain, "--media-metadata-by-extension", str(home / "tars")]
    spent: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(rounds):
        for name, command in commands.items():
            shutil.rmtree(home / "index", ignore_errors=True)
            shutil.rmtree(home / "tars" / ".nv-meta", ignore_errors=True)
            for listed in (home / "tars").glob("*.idx"):
                listed.unlink()
            spent[name].append(_run(home, command))
    return spent


def of_jsonl_s(home: Path, size_bytes: int, rounds: int) -> dict[int, list[float]]:
    """Seconds on the wall by the number of processes, in turns."""
    _write_documents(home / "documents.jsonl", size_bytes)
    job = yaml.safe_load((home / "job.yaml").read_text())
    job |= {"sources": [{"name": "documents", "format": "jsonl", "url": "documents.jsonl"}]}
    (home / "documents.yaml").write_text(yaml.safe_dump(job))
    took: dict[int, list[float]] = {1: [], 2: []}
    for _ in range(rounds):
        for processes, seconds in took.items():
            shutil.rmtree(home / "index", ignore_errors=True)
            began_s = time.monotonic()
            _run(home, [*_dataservice(home / "documents.yaml"), "--processes", str(processes)])
            seconds.append(time.monotonic() - began_s)
    return took


def _dataservice(job: Path) -> list[str]:
    return [sys.executable, "-m", "dataservice.cli.main", "index", str(job)]


def _run(home: Path, command: list[str]) -> float:
    """Seconds of the processor of what is started, and has ended with it."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        command, cwd=ROOT, env=child_environment(home), capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(
            f"{' '.join(command)} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def _write_documents(path: Path, size_bytes: int) -> None:
    """Documents of words of two to nine letters, some of which are drawn far more often."""
    random = np.random.default_rng(0)
    letters = np.array(list("etaoinshrdlucmfwypvbgk"))
    words = np.array(
        ["".join(random.choice(letters, size)) for size in random.integers(2, 9, 5000)]
    )
    written = 0
    with path.open("w") as file:
        while written < size_bytes:
            chosen = words[np.minimum(random.zipf(1.3, WORDS), words.size) - 1]
            written += file.write(json.dumps({"text": " ".join(chosen)}) + "\n")


def to_markdown(
    given: argparse.Namespace, tars_s: dict[str, list[float]], jsonl_s: dict[int, list[float]]
) -> str:
    """Both tables, and each figure over its bar."""
    lines = [
        "# Indexes: seconds of the processor, and processes",
        "",
        f"`python -m benchmarks.data.indexing` on {hardware()}; least of {given.rounds} rounds in "
        "turns.",
        "",
        f"| {given.pictures:,} JPEGs in tars | CPU s | pictures a CPU s |",
        "|---|---|---|",
    ]
    least = {name: min(seconds) for name, seconds in tars_s.items()}
    lines += [
        f"| {NAMES[name]} | {seconds:.1f} | {given.pictures / seconds:,.0f} |"
        for name, seconds in least.items()
    ]
    lines.append("")
    lines += [
        f"Pictures a CPU second over {NAMES[name]}: {seconds / least['ours']:.2f}; "
        f"the bar is to be ahead: {judged(seconds > least['ours'])}."
        for name, seconds in least.items()
        if name != "ours"
    ]
    one_s, two_s = min(jsonl_s[1]), min(jsonl_s[2])
    lines += [
        "",
        f"One JSONL of {given.jsonl_bytes / 1e6:.0f} MB: {one_s:.1f} s by one process, {two_s:.1f} "
        f"s by two: {one_s / two_s:.2f} times as fast; the bar is {JSONL_BAR}: "
        f"{judged(one_s / two_s >= JSONL_BAR)}.",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
