"""Events in memory, for tests."""

from __future__ import annotations

import threading

import pytest

import pipesight.trace as trace
from pipesight.testing import capture_events
from support.trace_files import event_names, zcat

ai = trace.ai


def test_capture():
    """Capture gives what was recorded in its block, and nothing before or after."""
    with ai.compute.step:
        pass
    with capture_events() as events:
        with ai.compute.forward(epoch=3):
            pass
        trace.counter("memory", used=1.5)
    with ai.compute.step:
        pass
    assert [(event["name"], event["ph"]) for event in events] == [("forward", "X"), ("memory", "C")]
    assert events[0]["args"]["epoch"] == 3


def test_capture_nested(tmp_path):
    """Captures may be nested, also in a trace; each has the events of its own block."""
    with trace.start(tmp_path / "run"):
        with ai.compute.forward:
            pass
        with capture_events() as outer:
            with ai.compute.backward:
                pass
            with capture_events() as inner, ai.compute.step:
                pass
        with ai.data.item:
            pass
    assert [event["name"] for event in inner] == ["step"]
    assert [event["name"] for event in outer] == ["backward", "step"]
    assert event_names(tmp_path / "run.pfw.gz") == ["forward", "backward", "step", "item"]


def test_trace_in_capture(tmp_path):
    """A trace that begins in a capture has the names of threads that recorded before."""
    with capture_events():
        thread = threading.Thread(target=ai.compute.step(lambda: None), name="early")
        thread.start()
        thread.join()
        with trace.start(tmp_path / "run"), ai.compute.forward:
            pass
    assert event_names(tmp_path / "run.pfw.gz") == ["forward"]
    assert '"early"' in zcat(tmp_path / "run.pfw.gz")


def test_capture_in_threads():
    """Threads that capture at the same time each see all events, of every thread, in order of their ends."""
    seen: list[int] = []

    def work() -> None:
        with capture_events() as events:
            for _ in range(200):
                with ai.compute.step:
                    pass
        mine = [event for event in events if event["tid"] == threading.get_native_id()]
        seen.append(len(mine))
        assert all(event["name"] == "step" for event in events)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [200] * 8


def test_capture_with_exception():
    """A capture ends with its block, however that ends."""
    with pytest.raises(KeyError), capture_events() as events, ai.compute.step:
        raise KeyError
    assert [event["name"] for event in events] == ["step"]
