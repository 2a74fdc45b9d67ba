"""``nvdlfw_inspect.utils``: identifying calls, joining docstrings, gathering tensors, loading files."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import torch

__all__ = ["APICacheIdentifier", "append_parent_docstring", "gather_along_first_dim", "import_and_exec_module"]

C = TypeVar("C", bound=type)


class APICacheIdentifier:
    """Tells calls apart by the line of code they come from and the arguments that matter."""

    _call_details = ""

    @classmethod
    def save_call_details(cls) -> None:
        """Remember the line that called the function this is called from."""
        frame: Any = sys._getframe(1)
        frame = frame.f_back or frame
        cls._call_details = f"{frame.f_code.co_filename}.{frame.f_lineno}"

    @classmethod
    def get_call_details(cls) -> str:
        """Return the line that was remembered, as ``file.line``."""
        return cls._call_details

    @classmethod
    def get_unique_identifier(
        cls, cacheable_apis: Mapping[str, Sequence[str]], layer_name: str, api_name: str, **kwargs: Any
    ) -> str | None:
        """Return what tells this call from others, or None if ``cacheable_apis`` has no such call."""
        if api_name not in cacheable_apis:
            return None
        arguments = [str(kwargs.get(argument, 0)) for argument in cacheable_apis[api_name]]
        return ".".join([cls._call_details, layer_name, api_name, *arguments])


def append_parent_docstring(parent: type) -> Callable[[C], C]:
    """Return a decorator that adds the docstring of ``parent`` to that of a class."""

    def append(cls: C) -> C:
        cls.__doc__ = "\n\n".join(text for text in (cls.__doc__, parent.__doc__) if text)
        return cls

    return append


def gather_along_first_dim(
    input_: torch.Tensor, process_group: torch.distributed.ProcessGroup | None, async_op: bool = False
) -> tuple[torch.Tensor, Any]:
    """Return the tensors of all ranks of a group, one after the other, and what to wait for if ``async_op``.

    They must be of one shape.
    """
    import torch.distributed

    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return input_, None
    ranks = torch.distributed.get_world_size(process_group)
    if ranks == 1:
        return input_, None
    part = input_.detach().contiguous()
    whole = part.new_empty((ranks, *part.shape))
    waiting = torch.distributed.all_gather(list(whole.unbind()), part, group=process_group, async_op=async_op)
    return whole.flatten(0, 1) if part.dim() else whole, waiting


def import_and_exec_module(module_path: str) -> None:
    """Run a Python file, for the features it registers.

    Raises:
        FileNotFoundError: There is no such file.
    """
    path = Path(module_path)
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {module_path!r} to import; give it the path of a .py file")
    spec = spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"not a Python file ({module_path!r}); give it the path of a .py file")
    spec.loader.exec_module(module_from_spec(spec))
