"""Generate the gRPC stubs from their sources, or check that the committed ones match.

`python -m tools.protos` writes them; `--check` compares and exits 1 on a difference.
"""

import os
import sys
import tempfile
from pathlib import Path

from grpc_tools import protoc

PROTOS = Path(__file__).resolve().parent.parent / "protos"
PACKAGE = PROTOS / "dataservice_proto" / "v1"


def generate(out: Path) -> None:
    """Run protoc over every source, stubs and type stubs into `out`."""
    # protoc finds the type stub plugins on PATH; they are installed beside this interpreter.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    sources = sorted(str(path) for path in PACKAGE.glob("*.proto"))
    outputs = [f"--{kind}_out={out}" for kind in ("python", "grpc_python", "mypy", "mypy_grpc")]
    if protoc.main(["protoc", f"-I{PROTOS}", *outputs, *sources]) != 0:
        raise SystemExit("protoc failed; its message is above")


def differences(made: Path) -> list[str]:
    """Names of generated files that are missing, differ or should not exist."""
    fresh = {p.name: p.read_text() for p in (made / "dataservice_proto" / "v1").iterdir()}
    kept = {p.name: p.read_text() for p in PACKAGE.iterdir() if "_pb2" in p.name}
    return sorted(name for name in fresh.keys() | kept.keys() if fresh.get(name) != kept.get(name))


def main() -> None:
    """Write, or with --check compare."""
    if "--check" not in sys.argv[1:]:
        generate(PROTOS)
        return
    with tempfile.TemporaryDirectory() as directory:
        generate(Path(directory))
        stale = differences(Path(directory))
    if stale:
        raise SystemExit(f"generated code is out of step: {', '.join(stale)}. Run `make protos`.")


if __name__ == "__main__":
    main()
