"""CPU of a delivered picture beside other loaders: `python -m benchmarks.data --out FOLDER`.

JPEGs of 1.5 megapixels, made by script, are delivered as uint8 in Qwen2-VL's size, with the token
ids of a caption. Loaders take turns; each is counted in steady state, with all its processes, and
the best of the rounds is shown. It takes a quarter of an hour. MosaicML Streaming has an
environment of its own, and is left out where that does not install.
"""

import argparse
import os
import sys
import tempfile
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from benchmarks.data.corpus import AHEAD, MAX_PIXELS, make_corpus
from benchmarks.data.measured import Span, environment, measured, service_over
from benchmarks.harness import hardware, judged, slug
from soak.processes import end_family

NAMES = {
    "pillow": "bare Pillow: decode, resize",
    "kernel": "bare, with this service's code",
    "grpc": "bare gRPC of the same bytes, 1 MiB messages",
    "mapping": "the same bytes through a bare mapping",
    "webdataset": "torch DataLoader(2) + webdataset",
    "streaming": "MosaicML Streaming, DataLoader(2)",
    "ray_data": "Ray Data, 2 CPUs",
    "service": "this service, 2 workers × 1 slot, over gRPC",
    "same_node": "the same, through memory of the machine",
}
PACKAGES = {"streaming": ("mosaicml-streaming==0.13.0", "torch==2.13.0", "pillow", "tokenizers")}
FLOOR_BAR, PEER_BAR = 1.15, 0.8
PEERS = ("webdataset", "streaming", "ray_data")
STREAMING = Path(__file__).parent / "peer_streaming.py"
OURS = ("service", "same_node")
PARTS = ("decoders", "workers", "coordinator", "client", "others")


def run(
    home: Path, cache: Path, chosen: list[str], given: argparse.Namespace
) -> dict[str, list[Span]]:
    """All loaders in turns."""
    commands = {name: _program(name, home) for name in chosen}
    if "streaming" in chosen:
        python = environment(cache, PACKAGES["streaming"])
        commands["streaming"] = [str(python), str(STREAMING), str(home), str(MAX_PIXELS)]
        if python is None:
            print("MosaicML Streaming does not install here: left out")
            del commands["streaming"]
    spans: dict[str, list[Span]] = {name: [] for name in commands}
    for turn in range(given.rounds):
        for name, command in list(commands.items()):
            try:
                span = _measured_once(name, command, home, given)
            except RuntimeError as error:
                if name not in PEERS:
                    raise
                print(f"{NAMES[name]} is left out, it does not run here: {error}")
                del commands[name], spans[name]
                continue
            spans[name].append(span)
            print(
                f"round {turn + 1}: {NAMES[name]}: {span.cpu_ms:.1f} ms, "
                f"{span.pictures_per_s:.0f}/s, load {os.getloadavg()[0]:.1f}",
                flush=True,
            )
    return spans


def _measured_once(name: str, command: list[str], home: Path, given: argparse.Namespace) -> Span:
    size = {"warm": given.warm, "pictures": given.pictures}
    if name in OURS:
        with service_over(home, pool=given.pool, workers=2):
            return measured(home, command, **size)
    try:
        return measured(home, command, **size)
    finally:
        end_family(home)


def _program(name: str, home: Path) -> list[str]:
    return [sys.executable, "-m", "benchmarks.data.programs", name, str(home)]


def to_markdown(spans: dict[str, list[Span]], given: argparse.Namespace) -> str:
    """The run as a results file."""
    best = {name: min(each, key=lambda span: span.cpu_ms) for name, each in spans.items()}
    lines = [
        "# Pictures delivered: milliseconds of the processor, all processes",
        "",
        f"`python -m benchmarks.data` on {hardware()}; {given.pictures} JPEGs of 1500 × 1000 after "
        f"{given.warm}, the best of {given.rounds} rounds in turns; workers: {given.pool}; load "
        f"{os.getloadavg()[1]:.1f} on {os.cpu_count()} cores. "
        + ", ".join(
            f"{name} {version(name)}"
            for name in ("pillow", "torch", "webdataset", "grpcio", "numba", "ray")
        )
        + ".",
        "",
        "| loader | CPU ms a picture | over bare Pillow | pictures/s |",
        "|---|---|---|---|",
    ]
    pillow = best["pillow"].cpu_ms if "pillow" in best else float("nan")
    for name, span in best.items():
        quickest = max(each.pictures_per_s for each in spans[name])
        ratio = f"{span.cpu_ms / pillow:.2f}" if "pillow" in best else "–"
        lines.append(f"| {NAMES[name]} | {span.cpu_ms:.1f} | {ratio} | {quickest:.0f} |")
    for name, wire in (("service", "grpc"), ("same_node", "mapping")):
        if name in best:
            lines += ["", *_service_lines(best, name, wire)]
    return "\n".join(lines) + "\n"


def _service_lines(best: dict[str, Span], name: str, wire: str) -> list[str]:
    """Where the service's time goes, and its bars."""
    ours = best[name]
    parts = ", ".join(f"{part} {ours.role_ms(part):.1f}" for part in PARTS)
    lines = [f"Of the {ours.cpu_ms:.1f} ms of {NAMES[name]}: {parts}."]
    if {"kernel", wire} <= best.keys():
        floor = best["kernel"].cpu_ms + best[wire].cpu_ms
        lines.append(
            f"Over bare decode and resize with the same code and {NAMES[wire]} ({floor:.1f} ms): "
            f"{ours.cpu_ms / floor:.2f}; the bar is {FLOOR_BAR}: "
            f"{judged(ours.cpu_ms / floor <= FLOOR_BAR)}."
        )
    peers = [best[name].cpu_ms for name in PEERS if name in best]
    if peers:
        ratio = ours.cpu_ms / min(peers)
        lines.append(
            f"Over the better of the other loaders: {ratio:.2f}; the bar is {PEER_BAR}: "
            f"{judged(ratio <= PEER_BAR)}."
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.data", description=__doc__)
    parser.add_argument("--pictures", type=int, default=600, help="that are counted in a round")
    parser.add_argument("--warm", type=int, default=200, help="that come before")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=NAMES, default=list(NAMES))
    parser.add_argument("--pool", choices=("ray", "local"), default="ray")
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir()) / "bench-data")
    parser.add_argument("--out", type=Path, help="folder for the page of results")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-data-") as folder:
        home = Path(folder)
        make_corpus(home, given.warm + given.pictures + AHEAD)
        text = to_markdown(run(home, given.cache, given.only, given), given)
    print(text)
    if given.out:
        given.out.mkdir(parents=True, exist_ok=True)
        page = given.out / f"data_{slug(hardware())}_{datetime.now(UTC):%Y-%m-%d}.md"
        page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
