"""The rooms of the house and who may import whom, as the design draws them."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PLACES = {"dataservice": ROOT / "dataservice", "trainer_client": ROOT / "trainer_client"}
OURS = ("dataservice", "dataservice_proto", "trainer_client", "demo", "tools", "benchmarks")

ALLOWED = {
    "core": {"shared"},
    "planning": {"core"},
    "sources": {"core"},
    "decode": {"core"},
    "workers": {"core"},
    "state": {"core"},
    "observability": {"core"},
    "jobs": {"core", "planning", "sources", "decode", "workers"},
    "operate": {"core", "jobs", "workers", "observability", "shared"},
    "engine": {"core", "planning", "shared"},
    "serving": {"core", "engine", "protos", "shared"},
}
SHARED = (["address"], ["columns"], ["crc32"], ["same_node"], ["whereabouts"])
PLANNING_FORBIDDEN = {
    "asyncio", "datetime", "io", "logging", "multiprocessing", "os", "pathlib", "random",
    "shutil", "socket", "subprocess", "tempfile", "threading", "time", "urllib",
}  # fmt: skip
CORE_ALLOWED = {"numpy"} | set(sys.stdlib_module_names)


def imports_of(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module or ""


def files_of(room: str) -> list[Path]:
    return sorted((ROOT / "dataservice" / room).rglob("*.py"))


def room_of(module: str) -> str | None:
    """The room a module of ours lies in; None for libraries."""
    parts = module.split(".")
    if parts[0] == "dataservice":
        return parts[1] if len(parts) > 1 else "dataservice"
    if parts[0] == "dataservice_proto":  # which also says how peers speak
        return "shared" if parts[1:] in SHARED else "protos"
    return parts[0] if parts[0] in OURS else None


@pytest.mark.parametrize("room", sorted(ALLOWED))
def test_a_room_imports_only_the_rooms_it_may(room: str) -> None:
    allowed = ALLOWED[room] | {room}
    strangers = [
        f"{path.relative_to(ROOT)} imports {module}"
        for path in files_of(room)
        for module in imports_of(path)
        if (target := room_of(module)) is not None and target not in allowed
    ]
    assert not strangers


def test_every_module_of_the_service_stands_under_a_rule() -> None:
    top = {p.name for p in (ROOT / "dataservice").iterdir() if (p / "__init__.py").exists()}
    assert top == set(ALLOWED) | {"cli"}
    loose = {p.name for p in (ROOT / "dataservice").glob("*.py")}
    assert loose == {"__init__.py", "app.py", "warm.py"}


@pytest.mark.parametrize(
    ("what", "heavy"),
    [
        ("jobs.job_file", ["grpc", "av", "numba", "scipy", "PIL", "tokenizers", "ray"]),
        ("jobs.cost_file", ["grpc", "av", "numba", "scipy", "PIL", "tokenizers", "ray"]),
        ("jobs.layout_files", ["grpc", "av", "numba", "scipy", "PIL", "tokenizers", "ray"]),
        ("operate.config", ["grpc", "av", "numba", "scipy", "PIL", "tokenizers", "ray"]),
        ("operate.fleet", ["grpc", "av", "numba", "scipy", "PIL", "tokenizers", "pyarrow", "ray"]),
        ("core.kernels", ["numba"]),
        ("jobs.indexing", ["grpc", "numba", "scipy", "pandas", "torch", "ray"]),
        ("jobs.mixture", ["grpc", "numba", "scipy", "pandas", "torch", "ray"]),
        ("serving.server", ["av", "numba", "scipy", "PIL", "tokenizers", "pyarrow", "ray"]),
        ("jobs.sample_pipeline", ["grpc", "torch", "ray"]),
        ("app", ["torch", "ray", "numba", "scipy", "av", "PIL", "tokenizers", "matplotlib"]),
        ("engine.coordinator", ["torch", "ray", "scipy.optimize", "matplotlib"]),
        ("jobs.opener", ["torch", "ray", "scipy.optimize", "matplotlib"]),
    ],
)
def test_what_is_loaded_first_loads_nothing_heavy_that_it_may_never_need(
    what: str, heavy: list[str]
) -> None:
    code = f"import sys, dataservice.{what}; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_trainer_client_imports_nothing_of_the_service() -> None:
    allowed = {"trainer_client", "protos", "shared", None}
    heavy = {"ray", "pyarrow", "av", "pydantic"}
    strangers = [
        f"{path.relative_to(ROOT)} imports {module}"
        for path in PLACES["trainer_client"].rglob("*.py")
        for module in imports_of(path)
        if room_of(module) not in allowed or module.split(".")[0] in heavy
    ]
    assert not strangers


def test_the_trainer_client_loads_no_heavy_package() -> None:
    heavy = ["ray", "pyarrow", "av", "dataservice", "pydantic"]
    code = f"import sys, trainer_client; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_planning_has_no_io_clock_threads_or_randomness() -> None:
    strangers = [
        f"{path.name} imports {module}"
        for path in files_of("planning")
        for module in imports_of(path)
        if module.split(".")[0] in PLANNING_FORBIDDEN
    ]
    assert not strangers


def test_core_needs_only_the_standard_library_and_numpy() -> None:
    strangers = [
        f"{path.name} imports {module}"
        for path in files_of("core")
        for module in imports_of(path)
        if room_of(module) is None
        and module.split(".")[0] not in CORE_ALLOWED
        and (path.name, module.split(".")[0]) != ("kernels.py", "numba")  # when one is called
    ]
    assert not strangers


def test_only_the_ray_pool_imports_ray() -> None:
    importers = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "dataservice").rglob("*.py")
        if any(module.split(".")[0] == "ray" for module in imports_of(path))
    }
    assert importers <= {"dataservice/workers/ray_pool.py"}


def test_only_wire_modules_of_serving_convert_protobuf() -> None:
    """Protobuf types stay at the border: serving and the trainer's client."""
    strangers = [
        str(path.relative_to(ROOT))
        for path in (ROOT / "dataservice").rglob("*.py")
        if path.parent.name != "serving"
        and any(room_of(module) == "protos" for module in imports_of(path))
    ]
    assert not strangers


def test_the_engine_takes_no_thread_from_a_pool_that_all_purposes_share() -> None:
    """A call that hangs would take one from health and from stopping; see engine/threads.py."""
    sharing = [
        str(path.relative_to(ROOT))
        for path in files_of("engine")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr in ("to_thread", "set_default_executor")
    ]
    assert not sharing


def test_what_reads_parquet_starts_no_thread_of_arrow() -> None:
    """One that still holds a Python file when a process ends takes the process with it: `terminate
    called`, status 134, in one run of fifty beside others."""
    reads = {"read_row_group", "read_row_groups", "iter_batches", "read_table"}
    calls = [
        (path.relative_to(ROOT), node)
        for path in (ROOT / "dataservice").rglob("*.py")
        if "pyarrow.parquet" in set(imports_of(path))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in reads
    ]
    assert len(calls) > 8
    assert not [
        f"{path}:{call.lineno}"
        for path, call in calls
        if not any(
            each.arg == "use_threads" and ast.unparse(each.value) == "False"
            for each in call.keywords
        )
    ]
