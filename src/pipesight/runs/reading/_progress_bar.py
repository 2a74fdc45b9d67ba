"""DuckDB's progress bar, which it would print to stdout when a query takes seconds."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import duckdb

__all__ = ["without_progress_bar"]


def without_progress_bar(database: duckdb.DuckDBPyConnection) -> None:
    """Turn the progress bar off. In a notebook without ipywidgets, there is none, and the setting is refused."""
    import duckdb

    with contextlib.suppress(duckdb.InvalidInputException):
        database.execute("SET enable_progress_bar = false")
