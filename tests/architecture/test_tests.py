"""Tests stand by themselves, and see of the product what everybody sees."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("tests", "soak", "demo", "benchmarks", "examples")
FILES = {
    str(path.relative_to(ROOT)): path.read_text()
    for room in ROOMS
    for path in sorted((ROOT / room).rglob("*.py"))
}
OURS = ("dataservice", "dataservice_proto", "trainer_client", "soak", "demo", "benchmarks", "tools")
BY_NAME = {"getattr", "setattr", "delattr", "hasattr", "object"}  # the last is mock.patch.object
NOT_OURS = {
    "os._exit": "documented, and the only way to end as a crash does",
    "dist.distributed_c10d._get_default_store": "torch's, which has no public name for it",
    "torch.UntypedStorage._new_with_weak_ptr": "torch's, without which nobody sees one emptied",
    "torch.Tensor._make_wrapper_subclass": "torch's documented way to a tensor that wraps another",
    "fully_shard.state(part)._fsdp_param_groups": "torch's, which shows nobody what FSDP2 holds",
    "_fully_shard._get_device_from_mesh": "torch's, which has FSDP2 compute where its mesh is",
    "_fsdp_param_group.FSDPParamGroup._validate_no_meta_params": "torch's, of the played device",
    "_attn_implementation": "transformers', whose setter wants a kernel behind the name flash",
    "_validate_device": "torch's, which closes flex attention's backward pass on CPUs to all users",
}


def is_private(name: str) -> bool:
    last = name.rpartition(".")[2]
    return last.startswith("_") and not last.endswith("__")


def private_names(source: str) -> Iterator[str]:
    """What a file reaches that a leading underscore marks as somebody else's own."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            if ast.unparse(node.value) not in ("self", "cls"):
                yield ast.unparse(node)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in OURS:
            full = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name for name in full if any(map(is_private, name.split("."))))
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in BY_NAME:
            texts = (a.value for a in node.args[:2] if isinstance(a, ast.Constant))
            yield from (text for text in texts if isinstance(text, str) and is_private(text))


def imports_of_tests(source: str) -> Iterator[str]:
    """The test modules that a file imports."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            inside = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            for alias in node.names:
                full = inside + alias.name
                if full.startswith("tests.") and ".test_" in full:
                    yield full


def test_no_file_imports_from_a_module_of_tests() -> None:
    found = [
        f"{path} imports {name}"
        for path, source in FILES.items()
        for name in imports_of_tests(source)
    ]
    assert not found, "what tests share lies in a file named after what it is"


def test_no_file_reaches_behind_a_public_interface() -> None:
    found = [
        f"{path} reaches {name}"
        for path, source in FILES.items()
        for name in private_names(source)
        if name not in NOT_OURS
    ]
    assert not found


@pytest.mark.parametrize(
    ("source", "what"),
    [
        ("pool._seats", "pool._seats"),
        ("self.pool._seats[0]", "self.pool._seats"),
        ("from trainer_client.run import _x, y", "trainer_client.run._x"),
        ("getattr(store, '_connection')", "_connection"),
        ("monkeypatch.setattr(index, '_POLL_S', 0)", "_POLL_S"),
        ("monkeypatch.setattr('dataservice.app._secret', None)", "dataservice.app._secret"),
        ("mock.patch.object(app, '_secret')", "_secret"),
    ],
)
def test_each_way_to_something_private_is_found(source: str, what: str) -> None:
    assert list(private_names(source)) == [what]


def test_each_way_to_a_module_of_tests_is_found() -> None:
    for source in (
        "from tests.engine.test_skips import leave",
        "from tests.engine import test_skips",
        "import tests.engine.test_skips",
    ):
        assert [name for name in imports_of_tests(source) if "tests.engine.test_skips" in name]


def test_what_is_one_s_own_or_everybody_s_is_left_alone() -> None:
    fine = "self._x\ncls._y\nx.__class__\nfrom torch._C import z\ngetattr(x, 'y')\nf('_z')"
    assert not list(private_names(fine))
    assert not list(imports_of_tests("from tests.sources.support import scan\nimport tests.ledger"))
