"""Nothing that a client sends is ever run: no loader that builds objects from bytes."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted(
    path for room in ("dataservice", "trainer_client") for path in (ROOT / room).rglob("*.py")
)
UNSAFE_MODULES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve"}
UNSAFE_CALLS = {
    "eval", "exec", "compile", "os.system", "os.popen", "torch.load", "torch.jit.load",
    "yaml.load", "yaml.load_all", "yaml.full_load", "yaml.unsafe_load", "yaml.unsafe_load_all",
    "jsonpickle.decode", "numpy.load", "joblib.load", "pandas.read_pickle",
}  # fmt: skip
# A worker hands its own factory to the processes that it starts, and takes nothing back so.
TO_OWN_CHILDREN = {
    "dataservice/workers/nursery_program.py imports pickle",
    "dataservice/workers/nursery.py imports pickle",
}
UNSAFE_KEYWORDS = {"allow_pickle", "shell"}


def unsafe(source: str) -> Iterator[str]:
    """What a file imports and calls of the above, whatever it calls it."""
    tree = ast.parse(source)
    named = {"np": "numpy"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = getattr(node, "module", None)
            for alias in node.names:
                full = f"{module}.{alias.name}" if module else alias.name
                named[alias.asname or alias.name.split(".")[0]] = (
                    full if alias.asname or module else full.split(".")[0]
                )
                if full.split(".")[0] in UNSAFE_MODULES:
                    yield f"imports {full}"
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        first, *rest = ast.unparse(node.func).split(".")
        called = ".".join([named.get(first, first), *rest])
        if called in UNSAFE_CALLS:
            yield f"calls {called}"
        for keyword in node.keywords:
            on = not (isinstance(keyword.value, ast.Constant) and not keyword.value.value)
            if keyword.arg in UNSAFE_KEYWORDS and on:
                yield f"calls {called} with {keyword.arg}"


def test_no_room_loads_what_could_run() -> None:
    found = {f"{p.relative_to(ROOT)} {what}" for p in FILES for what in unsafe(p.read_text())}
    assert len(FILES) > 100
    assert found == TO_OWN_CHILDREN


@pytest.mark.parametrize(
    ("source", "what"),
    [
        ("import pickle", "imports pickle"),
        ("from pickle import loads as take", "imports pickle.loads"),
        ("import torch as t\nt.load(path)", "calls torch.load"),
        ("from torch import load\nload(path)", "calls torch.load"),
        ("import yaml\nyaml.load(text)", "calls yaml.load"),
        ("import numpy as np\nnp.load(path)", "calls numpy.load"),
        ("read(path, allow_pickle=True)", "calls read with allow_pickle"),
        ("run(command, shell=flag)", "calls run with shell"),
        ("eval(text)", "calls eval"),
    ],
)
def test_each_way_of_writing_it_is_found(source: str, what: str) -> None:
    assert list(unsafe(source)) == [what]


def test_safe_neighbours_are_left_alone() -> None:
    safe = (
        "import yaml\nyaml.safe_load(t)\nmodel.compile()\nrun(command, shell=False)\nre.compile(x)"
    )
    assert not list(unsafe(safe))
