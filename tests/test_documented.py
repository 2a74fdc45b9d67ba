"""Every public name says what it is: functions, classes, their methods and fields, constants."""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib
import importlib.resources
import inspect
import json
import re
import types
import typing

import pytest

from support.schemas import NAMES, read_schema

MODULES = ["", "balance", "context", "distributed", "logs", "plan", "report", "skip", "stats", "testing", "trace"]


@functools.cache
def _tree(module: str) -> ast.Module:
    return ast.parse(inspect.getsource(importlib.import_module(module)))


def _documented(body: list[ast.stmt]) -> set[str]:
    """Names that a string literal follows: ``size: int`` and below it ``\"\"\"In bytes.\"\"\"``."""
    found = set()
    for statement, following in zip(body, [*body[1:], None], strict=True):
        targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
        if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
            found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return found


def _home(module: str, name: str) -> str:
    """The module that assigns a name, following imports."""
    for statement in ast.walk(_tree(module)):
        if isinstance(statement, ast.ImportFrom) and statement.module:
            for alias in statement.names:
                if (alias.asname or alias.name) == name:
                    return _home(statement.module, alias.name)
    return module


def _sections(doc: str) -> set[str]:
    """Names that a docstring explains under ``Attributes:`` or ``Args:``."""
    return set(re.findall(r"^    (?:    )?(\w+): \S", doc, re.MULTILINE))


def _missing_of_class(cls: type) -> list[str]:
    doc = cls.__doc__ or ""
    missing = [] if doc and not doc.startswith(f"{cls.__name__}(") else ["the class"]
    for name, member in vars(cls).items():
        if name.startswith("_") or isinstance(member, types.MemberDescriptorType):
            continue
        function = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
        if isinstance(member, functools.cached_property):
            function = member.func
        if inspect.isfunction(function) and not function.__doc__:
            missing.append(f"{name}()")
    (body,) = [
        node.body
        for node in ast.walk(_tree(cls.__module__))
        if isinstance(node, ast.ClassDef) and node.name == cls.__name__
    ]
    explained = _documented(body) | _sections(doc)
    fields = [node.target.id for node in body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)]
    if dataclasses.is_dataclass(cls) or hasattr(cls, "_fields") or typing.is_typeddict(cls):
        missing += [field for field in fields if not field.startswith("_") and field not in explained]
    return missing


def _reachable(cls: type) -> set[type]:
    """The class, and the dataclasses of this package that its fields lead to."""
    found: set[type] = set()
    waiting = [cls]
    while waiting:
        one = waiting.pop()
        if one in found or not one.__module__.startswith("pipesight"):
            continue
        found.add(one)
        if dataclasses.is_dataclass(one):
            waiting += [part for hint in typing.get_type_hints(one).values() for part in _classes_in(hint)]
    return found


def _classes_in(hint: object) -> list[type]:
    arguments = typing.get_args(hint)
    if not arguments:
        return [hint] if inspect.isclass(hint) else []
    return [one for argument in arguments for one in _classes_in(argument)]


@pytest.mark.parametrize("name", MODULES)
def test_every_public_name_is_documented(name):
    path = f"pipesight.{name}".rstrip(".")
    module = importlib.import_module(path)
    assert module.__doc__
    missing = {}
    for public in module.__all__:
        value = getattr(module, public)
        if isinstance(value, types.ModuleType) or public == "__version__":
            continue
        if inspect.isclass(value):
            lacks = [f"{one.__qualname__}: {lack}" for one in _reachable(value) for lack in _missing_of_class(one)]
        elif inspect.isroutine(value):
            lacks = [] if value.__doc__ else ["the function"]
        else:
            home = _home(path, public)
            lacks = [] if public in _documented(_tree(home).body) else [f"a string below it in {home}"]
        if lacks:
            missing[public] = lacks
    assert missing == {}


def _undescribed(schema: object, path: str = "") -> list[str]:
    """Keys of a JSON schema that neither say what they are nor refer to a definition."""
    if isinstance(schema, list):
        return [lack for part in schema for lack in _undescribed(part, path)]
    if not isinstance(schema, dict):
        return []
    keys = schema.get("properties", {})
    lacks = [f"{path}/{key}" for key, value in keys.items() if not {"description", "$ref"} & value.keys()]
    parts = {key: part for key, part in schema.items() if key != "if"}  # a condition names keys that are described
    return lacks + [lack for key, part in parts.items() for lack in _undescribed(part, f"{path}/{key}")]


@pytest.mark.parametrize("name", NAMES)
def test_every_json_key_is_described(name):
    assert _undescribed(read_schema(name)) == []


def test_every_key_of_a_trace_is_described():
    """Somewhere: the schema narrows a key down again for each kind of line."""
    schema = json.loads(importlib.resources.files("pipesight.trace").joinpath("schema.json").read_text())
    keys: dict[str, bool] = {}
    waiting: list[object] = [schema]
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict):
            for key, value in part.get("properties", {}).items():
                keys[key] = keys.get(key, False) or bool({"description", "$ref"} & value.keys())
            waiting += part.values()
        elif isinstance(part, list):
            waiting += part
    assert [key for key, described in keys.items() if not described] == []
    assert len(keys) > 10
