"""Processes that a server forks: they get the environment of now, not that of when the server began.

    this process --starts--> forkserver            keeps the environment of that moment
          |                      | forks
          '--preparation--> process                is told ours in what multiprocessing sends to each

What is sent sets the environment as it is unpickled, before anything of the program is imported there. It is made of
builtins alone: where pipesight cannot be imported yet, nothing fails.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Mapping
from typing import Any

__all__ = ["keep_up_to_date"]

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


class _Surroundings:
    """Once unpickled, the environment says of tracing what it said where this was pickled."""

    def __init__(self, values: Mapping[str, str]) -> None:
        self._values = dict(values)

    def __reduce__(self) -> tuple[Any, ...]:
        return exec, (_CODE, {"values": self._values})


def keep_up_to_date() -> None:
    """Have processes that are forked by a server told what the environment says of tracing, from now on."""
    spawn: Any = sys.modules.get("multiprocessing.spawn")
    if spawn is None or hasattr(spawn.get_preparation_data, "_pipesight"):
        return  # no server can be there yet, or it is done
    original = spawn.get_preparation_data

    @functools.wraps(original)
    def get_preparation_data(name: str) -> dict[str, Any]:
        values = {key: value for key, value in os.environ.items() if key.startswith("PIPESIGHT_")}
        return {**original(name), "pipesight": _Surroundings(values)}

    vars(get_preparation_data)["_pipesight"] = True
    spawn.get_preparation_data = get_preparation_data
