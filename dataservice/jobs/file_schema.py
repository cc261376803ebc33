"""The JSON schema of a file that users write, each key with the string below its field.

Pydantic would take these strings from the sources itself, when a module is loaded: a fifth of what
that takes, at every start of every process. Only mistakes and the reference need them.
"""

import ast
import functools
import inspect
import sys
from collections.abc import Iterator, Mapping
from itertools import pairwise

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core.core_schema import DataclassSchema, ModelSchema


@functools.cache
def schema_of(model: type[BaseModel]) -> JsonSchemaValue:
    """Everything that may stand in the file of a model."""
    return model.model_json_schema(schema_generator=_Described)


class _Described(GenerateJsonSchema):
    def dataclass_schema(self, schema: DataclassSchema) -> JsonSchemaValue:
        return _described(super().dataclass_schema(schema), schema["cls"])

    def model_schema(self, schema: ModelSchema) -> JsonSchemaValue:
        return _described(super().model_schema(schema), schema["cls"])


def _described(schema: JsonSchemaValue, of: type) -> JsonSchemaValue:
    keys = schema.get("properties", {})
    for each in inspect.getmro(of):
        for name, text in _texts_in(each.__module__).get(each.__name__, {}).items():
            if name in keys:
                keys[name].setdefault("description", text)
    return schema


@functools.cache
def _texts_in(module: str) -> Mapping[str, Mapping[str, str]]:
    """By class of a module, the strings below its fields."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except (KeyError, OSError, TypeError, SyntaxError):  # it has no source
        return {}
    classes = [each for each in ast.walk(tree) if isinstance(each, ast.ClassDef)]
    return {each.name: dict(_texts(each)) for each in classes}


def _texts(of: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for field, below in pairwise(of.body):
        match field, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(
                value=ast.Constant(value=str(text))
            ):
                yield name, inspect.cleandoc(text)
