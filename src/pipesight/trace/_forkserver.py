"""Processes that multiprocessing's forkserver forks: give them the current environment, not that of the server's start.

    this process --starts--> forkserver            keeps the environment of that moment
          |                      | forks
          '--preparation--> process                gets ours with the data that multiprocessing sends to each

Unpickling that data sets the environment, before the process imports anything of the program. It consists of builtins
alone, so that it works where pipesight cannot be imported yet.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Mapping
from typing import Any

__all__ = ["update_forkserver_children"]

_CODE = """
import os, sys
before = {name: value for name, value in os.environ.items() if name.startswith("PIPESIGHT_")}
if before != values:
    for name in before:
        del os.environ[name]
    os.environ.update(values)
    session = sys.modules.get("pipesight.trace.trace_session")
    if session is not None:
        session.follow_environment()
"""


class _Environment:
    """Unpickling it sets the variables of pipesight to what they were where it was pickled."""

    def __init__(self, values: Mapping[str, str]) -> None:
        self._values = dict(values)

    def __reduce__(self) -> tuple[Any, ...]:
        return exec, (_CODE, {"values": self._values})


def update_forkserver_children() -> None:
    """Send the variables of pipesight to all processes that a forkserver forks from now on."""
    spawn: Any = sys.modules.get("multiprocessing.spawn")
    if spawn is None or hasattr(spawn.get_preparation_data, "_pipesight"):
        return  # there is no server yet, or this was done before
    original = spawn.get_preparation_data

    @functools.wraps(original)
    def get_preparation_data(name: str) -> dict[str, Any]:
        values = {key: value for key, value in os.environ.items() if key.startswith("PIPESIGHT_")}
        return {**original(name), "pipesight": _Environment(values)}

    vars(get_preparation_data)["_pipesight"] = True
    spawn.get_preparation_data = get_preparation_data
