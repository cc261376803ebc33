"""Kernels that count no references make no array and hand none on; else memory could be freed."""

import ast
from pathlib import Path

import dataservice.planning

ROOM = Path(dataservice.planning.__file__).parent
# What a leaf may return: numbers, in tuples and `Rates` too.
PLAIN = {"int", "float", "bool", "None", "tuple", "Rates", "Change", "Constant"}


def kernels(tree: ast.Module, decorator: str) -> list[ast.FunctionDef]:
    return [
        node
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
        and any(isinstance(d, ast.Name) and d.id == decorator for d in node.decorator_list)
    ]


def test_leaves_return_numbers_and_call_no_kernel_that_counts():
    trees = {path: ast.parse(path.read_text()) for path in ROOM.rglob("*.py")}
    counting = {node.name for tree in trees.values() for node in kernels(tree, "kernel")}
    leaves = [(path, node) for path, tree in trees.items() for node in kernels(tree, "leaf")]
    assert leaves
    of_leaves = {node.name for _, node in leaves}
    for path, node in leaves:
        assert node.returns is not None
        names = {n.id for n in ast.walk(node.returns) if isinstance(n, ast.Name)}
        assert names <= PLAIN, f"{path.name}: {node.name} returns {sorted(names - PLAIN)}"
        called = {
            n.func.id
            for n in ast.walk(node)
            if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)
        }
        wrong = called & (counting - of_leaves)
        assert not wrong, f"{path.name}: {node.name} calls {sorted(wrong)}, which count references"
