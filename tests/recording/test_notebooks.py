"""Recordings in a notebook: a line in the output of the cell, which is kept up to date."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import duckdb
import pytest
import torch
from torch import nn

import pipesight
from pipesight.recording import notebook_line
from pipesight.report import open_run


class Shown:
    """What `IPython.display.display` returns, with all that was shown."""

    def __init__(self):
        self.lines = []

    def update(self, content, *, raw):
        assert raw
        self.lines.append(content["text/plain"])
        assert content["text/html"].startswith("<code>recording into ")


@pytest.fixture
def notebook(monkeypatch):
    """The surface of IPython that is used, in a kernel."""
    shown, module, display = Shown(), ModuleType("IPython"), ModuleType("IPython.display")

    def begin(content, *, raw, display_id):
        assert display_id
        shown.update(content, raw=raw)
        return shown

    module.get_ipython = lambda: SimpleNamespace(kernel=object())
    display.display = begin
    monkeypatch.setitem(sys.modules, "IPython", module)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    monkeypatch.setattr(notebook_line, "LEAST", 0.0)
    return SimpleNamespace(shown=shown, module=module)


def train(run, steps):
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pipesight.observe(run, logs=None):
        for _ in range(steps):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()


def test_line(run, notebook):
    """It has the last step and its time, and in the end how it ended and what to look at."""
    train(run, 3)
    first, *steps, last = notebook.shown.lines
    assert first == f"recording into {run}: no step yet"
    assert [line.split()[3:6] for line in steps] == [["step", "0", "took"], ["step", "1", "took"]]
    assert last == f"recording into {run}: ok, 3 steps; pipesight report {run}"


def test_reading_where_there_is_no_progress_bar(run, monkeypatch):
    """DuckDB refuses to turn its progress bar off in notebooks without ipywidgets; runs are read all the same."""
    connect = duckdb.connect

    class Refuses:
        def __init__(self, database):
            self._database = database

        def execute(self, query, *arguments):
            if "progress_bar" in query:
                raise duckdb.InvalidInputException("required package 'ipywidgets' is missing")
            return self._database.execute(query, *arguments)

        def __getattr__(self, name):
            return getattr(self._database, name)

    train(run, 3)
    monkeypatch.setattr(duckdb, "connect", lambda **options: Refuses(connect(**options)))
    with open_run(run) as opened:
        assert opened.steps() == [0, 1, 2]


def test_elsewhere(run, notebook):
    """A terminal of IPython, whose output cannot change, shows nothing."""
    notebook.module.get_ipython = lambda: SimpleNamespace(kernel=None)
    train(run, 2)
    assert notebook.shown.lines == []


def test_display_that_fails(run, notebook, caplog):
    """What goes wrong with the line is logged, and training goes on."""
    notebook.shown.update = None
    train(run, 2)
    assert "the recording of a run could not show the recording; training goes on" in caplog.text
