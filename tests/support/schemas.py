"""The schemas of `pipesight.report`: what a command prints, or a run directory holds, is as they say."""

from __future__ import annotations

import functools
import importlib.resources
import json
from typing import Any

from jsonschema import Draft202012Validator
from referencing import Registry, Resource

__all__ = ["NAMES", "read_schema", "validated"]

NAMES = ("comparison", "plan", "report", "run", "statistics")


def read_schema(name: str) -> Any:
    """Return the schema of one of `NAMES`."""
    return json.loads(importlib.resources.files("pipesight.report").joinpath(f"{name}.schema.json").read_text())


@functools.cache
def _validator(name: str) -> Draft202012Validator:
    resources = [(f"{other}.schema.json", Resource.from_contents(read_schema(other))) for other in NAMES]
    return Draft202012Validator(read_schema(name), registry=Registry().with_resources(resources))


def validated(name: str, value: Any) -> Any:
    """Return a value after comparing it, as strict JSON, with a schema."""
    value = json.loads(json.dumps(value, allow_nan=False))
    _validator(name).validate(value)
    return value
