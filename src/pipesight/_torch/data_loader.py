"""``DataLoader``: its iterators, its fetchers and its workers. Importing this does not import torch."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

__all__ = ["after_worker_signal_handlers", "fetchers", "iterator_class", "worker_iterator_class", "yielded"]


def iterator_class() -> Any:
    """Return the class that all iterators over a DataLoader derive from."""
    from torch.utils.data import dataloader

    return dataloader._BaseDataLoaderIter


def worker_iterator_class() -> Any:
    """Return the class of iterators that start workers."""
    from torch.utils.data import dataloader

    return dataloader._MultiProcessingDataLoaderIter


def fetchers() -> tuple[Any, ...]:
    """Return the classes whose ``fetch`` makes a batch of the items of a dataset."""
    from torch.utils.data._utils import fetch

    return fetch._MapDatasetFetcher, fetch._IterableDatasetFetcher


def yielded(iterator: Any) -> int:
    """Return how many batches an iterator has yielded."""
    return int(iterator._num_yielded)


def after_worker_signal_handlers(then: Callable[[], None]) -> None:
    """Call ``then`` where a worker has got torch's signal handlers, if torch is imported; once a process."""
    handling: Any = sys.modules.get("torch.utils.data._utils.signal_handling")
    original = getattr(handling, "_set_worker_signal_handlers", None)
    if original is None or hasattr(original, "_pipesight"):
        return

    def set_worker_signal_handlers() -> None:
        original()
        then()

    vars(set_worker_signal_handlers)["_pipesight"] = True
    handling._set_worker_signal_handlers = set_worker_signal_handlers
