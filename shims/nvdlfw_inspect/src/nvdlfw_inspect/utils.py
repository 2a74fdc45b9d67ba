"""``nvdlfw_inspect.utils``, for pipesight."""

from pipesight.stats.extensions import (
    APICacheIdentifier,
    append_parent_docstring,
    gather_along_first_dim,
    import_and_exec_module,
)

__all__ = ["APICacheIdentifier", "append_parent_docstring", "gather_along_first_dim", "import_and_exec_module"]
