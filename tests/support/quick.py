"""`pytest --quick`: the tests that start no process and are not marked as slow, each with one of its parameter sets.

Which tests start a process is read off their code, so that nobody has to mark them; a guard fails those that start one
all the same.
"""

from __future__ import annotations

import inspect
import sys
import zlib
from collections import defaultdict
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

import pytest

__all__ = ["ELSEWHERE", "forbid_processes", "pick"]

STARTERS = {
    *("browser", "dask_client", "faults", "fork", "multiprocessing"),
    *("num_workers", "subprocess", "torchrun", "warm"),
}
"""Names in the code of tests that start processes."""
EVENTS = frozenset({"os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "subprocess.Popen"})
"""What Python's audit calls it when they do."""
ELSEWHERE = ("cuda", "docs", "fuzz")
"""Folders of tests that are not for a quick look: they need a GPU, or run for long."""
SLOW = {"alone", "slow"}
"""Markers of others."""


def pick(items: list[pytest.Function]) -> list[pytest.Function]:
    """Choose the tests to run: of each function that starts no process, the same one parameter set every time."""
    cases: dict[str, list[pytest.Function]] = defaultdict(list)
    for item in items:
        if not SLOW & {mark.name for mark in item.iter_markers()}:
            cases[item.nodeid.partition("[")[0]].append(item)
    chosen = [same[zlib.crc32(name.encode()) % len(same)] for name, same in cases.items()]
    return [item for item in chosen if not _starts_processes(item)]


def forbid_processes() -> None:
    """Let every attempt to start a process fail, until this one ends."""

    def refuse(event: str, _: Any, forbidden: frozenset[str] = EVENTS) -> None:
        if event in forbidden:
            pytest.fail("a quick run starts no process: mark the test as slow, or see STARTERS in quick.py")

    sys.addaudithook(refuse)


def _starts_processes(item: pytest.Function) -> bool:
    fixtures = [each.func for defined in item._fixtureinfo.name2fixturedefs.values() for each in defined]
    hypothesis = getattr(item.function, "hypothesis", None)
    test = hypothesis.inner_test if hypothesis else item.function
    seen: set[CodeType] = set()
    return any(_reaches(function, seen) for each in (test, *fixtures) for function in _functions(each))


def _reaches(function: FunctionType, seen: set[CodeType]) -> bool:
    """Whether a function, or what it calls of the tests' own, has one of the names in its code."""
    if function.__code__ in seen:
        return False
    seen.add(function.__code__)
    codes = list(_nested(function.__code__))
    names = {name for code in codes for name in (*code.co_names, *code.co_varnames)}
    names |= {name for code in codes for each in code.co_consts if isinstance(each, tuple) for name in each}  # keywords
    called = [function.__globals__.get(name) for name in names]
    ours = [each for each in called if str(getattr(each, "__module__", "")).startswith(("tests.", "support."))]
    return bool(names & STARTERS) or any(_reaches(inner, seen) for each in ours for inner in _functions(each))


def _nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nested(constant)


def _functions(thing: Any) -> list[FunctionType]:
    """The functions of a class, or the one that a decorator wraps."""
    found = [getattr(each, "__func__", each) for each in vars(thing).values()] if inspect.isclass(thing) else [thing]
    unwrapped = [inspect.unwrap(each) for each in found if callable(each)]
    return [each for each in unwrapped if isinstance(each, FunctionType)]
