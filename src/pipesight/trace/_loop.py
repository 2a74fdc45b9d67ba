"""`Node.iter`: the waits of a loop, and the runs of its body."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

from pipesight.trace._span_events import Span, begin, end, remove

if TYPE_CHECKING:
    from pipesight.trace._wrap import Recordable

__all__ = ["Loop"]


class Loop:
    """An iterator over another iterable, synchronous or not, that records both sides of each item.

    ::

        next(iterable)   body           next(iterable)   body
        |--- X.iter ---| |-- X.block --||--- X.iter ---| |-- X.block --|   ...

    The body's span also ends when ``break`` or an exception leaves the loop, since Python then drops the iterator.
    """

    def __init__(self, iterable: Any, wait: Recordable | None, block: Recordable | None) -> None:
        self._is_sync = hasattr(iterable, "__iter__") or hasattr(iterable, "__getitem__")
        self._is_async = hasattr(iterable, "__aiter__")
        if not self._is_sync and not self._is_async:
            raise TypeError(f"{type(iterable).__name__!r} object is not iterable")
        self._iterable = iterable
        self._iterator: Any = None  # made in the first wait, in which a DataLoader starts its workers
        self._wait, self._block = wait, block
        self._count = 0
        self._body: Span | None = None

    def __iter__(self) -> Loop:
        if not self._is_sync:
            raise TypeError(f"{type(self._iterable).__name__!r} is asynchronous: use 'async for'")
        return self

    def __next__(self) -> Any:
        waiting = self._begin_wait()
        try:
            if self._iterator is None:
                self._iterator = iter(self._iterable)
            item = next(self._iterator)
        except BaseException as error:
            self._end_failed_wait(waiting, error)
            raise
        self._end_wait(waiting)
        return item

    def __aiter__(self) -> Loop:
        if not self._is_async:
            raise TypeError(f"{type(self._iterable).__name__!r} is not asynchronous: use 'for'")
        return self

    async def __anext__(self) -> Any:
        waiting = self._begin_wait()
        try:
            if self._iterator is None:
                self._iterator = aiter(self._iterable)
            item = await anext(self._iterator)
        except BaseException as error:
            self._end_failed_wait(waiting, error)
            raise
        self._end_wait(waiting)
        return item

    def _begin_wait(self) -> Span | None:
        self.close()
        self._count += 1
        return begin(self._wait) if self._wait is not None and self._wait.recording else None

    def _end_failed_wait(self, waiting: Span | None, error: BaseException) -> None:
        if waiting is not None and isinstance(error, (StopIteration, StopAsyncIteration)):
            remove(waiting)  # there was no item to wait for
        elif waiting is not None and self._wait is not None:
            end(waiting, self._args_of(self._wait))

    def _end_wait(self, waiting: Span | None) -> None:
        if waiting is not None and self._wait is not None:
            end(waiting, self._args_of(self._wait))
        if self._block is not None and self._block.recording:
            self._body = begin(self._block)

    def close(self) -> None:
        """End the span of the loop's body, if one is open."""
        if self._body is not None and self._block is not None:
            body, self._body = self._body, None
            end(body, self._args_of(self._block))

    def _args_of(self, node: Recordable) -> dict[str, Any]:
        return {**node.args, "count": str(self._count)}  # a string, as readers of DFTracer's files expect

    def __len__(self) -> int:
        return len(self._iterable)

    def __bool__(self) -> bool:
        return bool(self._iterable)

    def __length_hint__(self) -> int:
        hint = operator.length_hint(self._iterable, -1)
        return NotImplemented if hint < 0 else hint

    def __del__(self) -> None:
        if getattr(self, "_body", None) is not None:
            self.close()
