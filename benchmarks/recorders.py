"""Recorders of spans, each as a runner: 80,000 spans with two integer arguments are one step.

Run by itself, it tells what a recorder leaves on disk, or how much memory it takes:

    python -m benchmarks.recorders bytes pipesight 1000000
    python -m benchmarks.recorders memory pipesight 10000000
"""

import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.job import require_original

__all__ = ["RECORDERS", "Recorder"]

SPANS = 80_000
PIECE = 1_000  # recorded spans are let go of after so many
FLUSHED = 10_000  # and written after so many

Loop = Callable[[int], None]


class Recorder:
    """Records spans in a loop, as fast as it can."""

    def __init__(self, name: str) -> None:
        self.piece = FLUSHED if name == "pipesight" else SPANS
        self.folder = tempfile.TemporaryDirectory()
        self.stack = contextlib.ExitStack()
        self.loop: Loop = self.stack.enter_context(RECORDERS[name](Path(self.folder.name)))

    def run(self, steps: int) -> None:
        for _ in range(steps * SPANS // self.piece):
            self.loop(self.piece)

    def gradient_norms(self) -> list[float]:
        return []

    def close(self) -> None:
        self.stack.close()
        self.folder.cleanup()


@contextlib.contextmanager
def nullcontext(folder: Path) -> Iterator[Loop]:
    def loop(spans: int) -> None:
        for _ in range(spans):
            with contextlib.nullcontext():
                pass

    yield loop


def loop_of(span: Any) -> Loop:
    def loop(spans: int) -> None:
        for _ in range(spans):
            with span:
                pass

    return loop


@contextlib.contextmanager
def pipesight_recording(folder: Path) -> Iterator[Loop]:
    """What a span costs where it is: nothing is written, but what was recorded is let go of."""
    from pipesight.trace import _span_events, ai
    from pipesight.trace._recording_switch import set_recording

    set_recording(True)
    ai.update(epoch=1, step=2)
    inner = loop_of(ai.compute.forward)

    def loop(spans: int) -> None:
        for _ in range(spans // PIECE):
            inner(PIECE)
            _span_events.EVENTS.clear()

    yield loop


@contextlib.contextmanager
def pipesight_disabled(folder: Path) -> Iterator[Loop]:
    from pipesight import trace

    with trace.start(folder / "trace"):
        trace.ai.disable()
        yield loop_of(trace.ai.compute.forward)


@contextlib.contextmanager
def pipesight_writing(folder: Path) -> Iterator[Loop]:
    from pipesight import trace

    with trace.start(folder / "trace"):
        trace.ai.update(epoch=1, step=2)
        inner = loop_of(trace.ai.compute.forward)

        def loop(spans: int) -> None:
            inner(spans)
            trace.flush()

        yield loop


def in_threads(
    recorder: Callable[[Path], contextlib.AbstractContextManager[Loop]],
) -> Callable[[Path], contextlib.AbstractContextManager[Loop]]:
    """Share the spans out to 8 threads."""

    @contextlib.contextmanager
    def recorder_in_threads(folder: Path) -> Iterator[Loop]:
        with recorder(folder) as one, ThreadPoolExecutor(8) as pool:

            def loop(spans: int) -> None:
                list(pool.map(one, [spans // 8] * 8))

            yield loop

    return recorder_in_threads


@contextlib.contextmanager
def dftracer(folder: Path) -> Iterator[Loop]:
    os.environ |= {"DFTRACER_ENABLE": "1", "DFTRACER_INC_METADATA": "1"}
    from dftracer.python import ai  # type: ignore[import-not-found, unused-ignore]
    from dftracer.python import dftracer as peer  # type: ignore[import-not-found, unused-ignore]

    require_original(sys.modules["dftracer.python"])
    log = peer.initialize_log(str(folder / "trace.pfw"), str(folder), -1)
    ai.update(epoch=1, step=2)
    yield loop_of(ai.compute.forward)
    log.finalize()


@contextlib.contextmanager
def viztracer(folder: Path) -> Iterator[Loop]:
    from viztracer import VizTracer  # type: ignore[import-not-found, unused-ignore]

    tracer = VizTracer(tracer_entries=SPANS * 4, verbose=0, max_stack_depth=0)

    def loop(spans: int) -> None:
        tracer.start()
        for _ in range(spans):
            with tracer.log_event("forward"):
                pass
        tracer.stop()
        tracer.save(str(folder / "trace.json"))
        tracer.clear()

    yield loop


RECORDERS: dict[str, Callable[[Path], contextlib.AbstractContextManager[Loop]]] = {
    "nullcontext": nullcontext,
    "pipesight, recording": pipesight_recording,
    "pipesight, disabled": pipesight_disabled,
    "nullcontext, 8 threads": in_threads(nullcontext),
    "pipesight, 8 threads": in_threads(pipesight_recording),
    "pipesight": pipesight_writing,
    "dftracer": dftracer,
    "viztracer": viztracer,
}


def bytes_on_disk(name: str, spans: int) -> float:
    """Return the bytes a span takes on disk."""
    with tempfile.TemporaryDirectory() as folder:
        with RECORDERS[name](Path(folder)) as loop:
            loop(spans)
        return sum(path.stat().st_size for path in Path(folder).iterdir()) / spans


def resident(name: str, spans: int) -> list[float]:
    """Return the resident memory in MiB after each tenth of the spans."""
    pages: list[float] = []
    with tempfile.TemporaryDirectory() as folder, RECORDERS[name](Path(folder)) as loop:
        for _ in range(10):
            loop(spans // 10)
            pages.append(int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20)
    return pages


if __name__ == "__main__":
    what, which, count = sys.argv[1:]
    measured = {"bytes": bytes_on_disk, "memory": resident}[what](which, int(count))
    print(json.dumps(measured))
