"""Options and fixtures for all tests."""

from __future__ import annotations

import gc
import os
import signal

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in the background of a shell; processes of tests inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # as under nohup; these tests go on, but not their processes
    signal.signal(signal.SIGHUP, lambda *_: None)

# Tests run beside each other, and threads that wait for work of a few numbers spin. Processes that tests start get it.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import hypothesis
import pytest
import torch

from support import quick

# How long an example takes says how busy the machine is.
hypothesis.settings.register_profile("anywhere", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.register_profile("quick", parent=hypothesis.settings.get_profile("anywhere"), max_examples=10)
hypothesis.settings.load_profile("anywhere")


def pytest_addoption(parser):
    parser.addoption("--quick", action="store_true", help="only tests that start no process, one case of each")


def pytest_configure(config):
    if config.option.quick:
        hypothesis.settings.load_profile("quick")


def pytest_ignore_collect(collection_path, config):
    if config.option.quick and collection_path.name in quick.ELSEWHERE:
        return True
    return None


def pytest_collection_modifyitems(config, items):
    if config.option.quick:
        chosen = quick.pick(items)
        left = set(items) - set(chosen)
        items[:] = chosen
        config.hook.pytest_deselected(items=list(left))


def pytest_collection_finish(session):
    gc.collect()
    gc.freeze()  # what was imported is here to stay: no later collection has to go through it
    if session.config.option.quick:
        quick.forbid_processes()


def pytest_unconfigure():
    gc.unfreeze()  # or extension modules count what is left at the end as leaked


@pytest.fixture(autouse=True)
def on_the_cpu(request, monkeypatch):
    """Hide the GPUs from all tests but those in tests/cuda: without devices, GPipe takes the GPUs that are there."""
    if request.path.parent.name != "cuda":
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
