"""Record each batch that a DataLoader fetches, in the main process and in its workers, and each epoch."""

from __future__ import annotations

import multiprocessing
import weakref
from collections.abc import Callable
from typing import Any

from torch.utils.data import get_worker_info

from pipesight._nested import samples_in
from pipesight._patches import Patches
from pipesight._torch.data_loader import fetchers, iterator_class, worker_iterator_class, yielded
from pipesight._torch.tensors import without_function_overrides
from pipesight.trace._span_events import begin, end, now, past, remove
from pipesight.trace.ai import ai
from pipesight.trace.automatic._step_argument import with_step

__all__ = ["instrument_loading"]

_begun: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


def instrument_loading(patches: Patches) -> None:
    """Record ``dataloader.fetch``, and ``pipeline.epoch`` where a loader is exhausted."""
    patches.wrap(iterator_class(), "__next__", _next)
    patches.wrap(worker_iterator_class(), "__init__", _start_workers)
    for fetcher in fetchers():
        patches.wrap(fetcher, "fetch", _fetch_in_worker)


def _next(original: Callable[..., Any], iterator: Any) -> Any:
    node = ai.dataloader.fetch
    if iterator not in _begun:
        _begun[iterator] = now()
    if not node.recording:
        return original(iterator)
    span = begin(node)
    try:
        batch = original(iterator)
    except StopIteration:
        remove(span)  # there was no batch to wait for
        epoch = ai.pipeline.epoch
        if epoch.recording and (start := _begun.pop(iterator, None)) is not None:
            past(epoch, start, now(), with_step(epoch.args, batches=yielded(iterator)))
        raise
    except BaseException:
        end(span, with_step(node.args))
        raise
    end(span, with_step(node.args, batch=yielded(iterator) - 1, **_samples(batch)))
    return batch


def _samples(batch: Any) -> dict[str, int]:
    """Return how many samples a batch has: what its first tensor is long, or nothing if it has none."""
    with without_function_overrides():
        samples = samples_in(batch)
    return {} if samples is None else {"samples": samples}


def _fetch_in_worker(original: Callable[..., Any], fetcher: Any, indices: Any) -> Any:
    node = ai.dataloader.fetch
    worker = get_worker_info()
    if worker is None or not node.recording:  # in the main process, `_next` records it
        return original(fetcher, indices)
    items = len(indices) if isinstance(indices, list) else 1  # without a batch size, a sampler may yield anything
    with node(args={"worker": worker.id, "items": items}):
        return original(fetcher, indices)


def _start_workers(original: Callable[..., Any], iterator: Any, loader: Any) -> None:
    """Instrument workers that are spawned; forked ones already are."""
    method = (loader.multiprocessing_context or multiprocessing).get_start_method()
    if method == "fork" or isinstance(loader.worker_init_fn, _Instrumented):
        original(iterator, loader)
        return
    before = loader.worker_init_fn
    object.__setattr__(loader, "worker_init_fn", _Instrumented(before))
    try:
        original(iterator, loader)
    finally:
        object.__setattr__(loader, "worker_init_fn", before)


class _Instrumented:
    """A ``worker_init_fn`` that instruments the worker first. Unpickling it imports `pipesight.trace`."""

    def __init__(self, function: Callable[[int], None] | None) -> None:
        self._function = function

    def __call__(self, worker: int) -> None:
        from pipesight.trace.automatic import instrument

        instrument()
        if self._function is not None:
            self._function(worker)
