"""Generate the gRPC stubs from their sources, or check that the committed ones match.

`python -m tools.protos` writes them; `--check` compares and exits 1 on a difference.

The type stubs are protoc's. The code is a descriptor and a call of dataservice_proto.descriptors,
which says why it isn't protoc's too.
"""

import os
import sys
import tempfile
from pathlib import Path

from google.protobuf.descriptor_pb2 import FileDescriptorSet
from grpc_tools import protoc

PROTOS = Path(__file__).resolve().parent.parent / "protos"
PACKAGE = PROTOS / "dataservice_proto" / "v1"

MESSAGES = '''\
"""The messages of {source}. Written by tools/protos.py: do not edit."""

from google.protobuf.descriptor_pool import Default

from dataservice_proto.descriptors import message_names
{imports}
DESCRIPTOR = Default().AddSerializedFile(
    {descriptor!r}
)
globals().update(message_names(DESCRIPTOR, __name__))
'''

SERVICES = '''\
"""The services of {source}. Written by tools/protos.py: do not edit."""

from dataservice_proto.descriptors import service_names
from {package} import {module}

globals().update(service_names({module}.DESCRIPTOR, __name__))
'''

# What protoc's plugin for type stubs tells of code that is not there.
UNTRUE = "GRPC_GENERATED_VERSION: str\nGRPC_VERSION: str\n\n"


def generate(out: Path) -> None:
    """Write the code and the type stubs of every source under `out`."""
    # protoc finds the type stub plugins on PATH; they are installed beside this interpreter.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    sources = sorted(PACKAGE.glob("*.proto"))
    with tempfile.TemporaryDirectory() as directory:
        described = Path(directory) / "descriptors"
        outputs = [
            f"--mypy_out={out}",
            f"--mypy_grpc_out={out}",
            f"--descriptor_set_out={described}",
        ]
        if protoc.main(["protoc", f"-I{PROTOS}", *outputs, *map(str, sources)]) != 0:
            raise SystemExit("protoc failed; its message is above")
        files = FileDescriptorSet.FromString(described.read_bytes()).file
    for file in files:
        stem = str(out / file.name.removesuffix(".proto"))
        package, module = _module(file.name)
        Path(f"{stem}_pb2.py").write_text(
            MESSAGES.format(
                source=file.name,
                # Of use to the pool alone: it knows no message before its module is imported.
                imports="".join(
                    "from {} import {}  # noqa: F401\n".format(*_module(name))
                    for name in file.dependency
                ),
                descriptor=file.SerializeToString(deterministic=True),
            )
        )
        Path(f"{stem}_pb2_grpc.py").write_text(
            SERVICES.format(source=file.name, package=package, module=module)
        )
        types = Path(f"{stem}_pb2_grpc.pyi")
        types.write_text(types.read_text().replace(UNTRUE, ""))


def _module(source: str) -> tuple[str, str]:
    """The package and the name of the module of a source's messages."""
    package, _, name = source.removesuffix(".proto").replace("/", ".").rpartition(".")
    return package, f"{name}_pb2"


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
