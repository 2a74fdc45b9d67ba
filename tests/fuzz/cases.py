"""How many cases a fuzzer tries, and what became of them.

A fuzzer is a property test of hypothesis: it draws a case, runs it, compares it with the truth, and calls
`account` with what came of it. `make test` tries a few cases, always the same ones; `make fuzz CASES=10000` tries as
many as it is told, other ones each time. Hypothesis shrinks a case that fails and prints it, with the seed.
"""

from __future__ import annotations

import collections
import os
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, settings

__all__ = ["COUNTS", "account", "fuzz"]

COUNTS: dict[str, collections.Counter[str]] = {}
"""For each fuzzer, how many cases came to what."""


def fuzz(few: int) -> Callable[[Any], Any]:
    """The settings of a fuzzer: so few fixed cases in `make test`, `$FUZZ_CASES` other ones in `make fuzz`."""
    cases = os.environ.get("FUZZ_CASES")
    return settings(
        max_examples=int(cases or few),
        derandomize=cases is None,
        database=None,
        deadline=None,
        print_blob=True,
        suppress_health_check=list(HealthCheck),
    )


def account(fuzzer: str, outcome: str) -> None:
    """Count a case of a fuzzer: "agreed", or "excused: " and the reason, which docs/reference/reliability.md lists."""
    COUNTS.setdefault(fuzzer, collections.Counter())[outcome] += 1
