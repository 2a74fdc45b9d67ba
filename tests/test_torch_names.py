"""Torch's private names stand in one package, ``pipesight._torch``: what a new version of torch breaks is there."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import pipesight

SOURCE = Path(pipesight.__file__).parent
FILES = sorted(path for path in SOURCE.rglob("*.py") if path.parent != SOURCE / "_torch")

STABLE = {"_version", "_modules", "_parameters", "_buffers"}
"""As old as torch itself, and read in hot loops: a function would only rename them."""
OVERRIDDEN = {"_apply", "_check_input_dim", "_get_init_p2p_neighbors_ops", "_load_from_state_dict"}
OVERRIDDEN |= {"_per_optimizer_states", "_unscale_grads_"}
"""Of torch's classes, for whoever derives from them."""
OTHERS = {"_getframe", "_current_frames", "_exit", "_DummyThread", "_SubParsersAction", "_log", "_builtin_namespace"}
OTHERS |= {"_fields", "_choices_actions", "_option_string_actions"}
"""Of the standard library and of DuckDB."""


def own_names() -> set[str]:
    """Return the private names that the project gives to things of its own."""
    found = set()
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
                    found.add(node.attr)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
    return found


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith(("__", "_pipesight"))


def private_names(path: Path, known: set[str]) -> Iterator[str]:
    """Yield what a file names of others' private interface."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name.split(".")[0] == "torch"]
            yield from (name for name in names if any(map(is_private, name.split("."))))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name for name in names if any(map(is_private, name.split("."))))
        elif isinstance(node, ast.Attribute) and is_private(node.attr):
            chain = ast.unparse(node)
            if chain.startswith(("torch.", "nn.", "dist.")) or node.attr not in known:
                yield chain
        elif isinstance(node, ast.Constant) and re.fullmatch(r"torch(\.\w+)*\._\w+(\.\w+)*", str(node.value)):
            yield node.value
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr"):
            name = node.args[1]
            if isinstance(name, ast.Constant) and is_private(name.value) and name.value not in known:
                yield f"{node.func.id}(..., {name.value!r})"


@pytest.mark.slow
def test_private_names_of_torch_stand_in_one_package():
    """No module but those of ``_torch`` names them, except those listed above with the reason."""
    known = own_names()
    allowed = STABLE | OVERRIDDEN | OTHERS
    found = []
    for path in FILES:
        file = str(path.relative_to(SOURCE))
        found += [(file, name) for name in private_names(path, known) if name.rpartition(".")[2] not in allowed]
    assert not found, "wrap these in pipesight._torch"


@pytest.mark.parametrize(
    "line",
    [
        "import torch._dynamo",
        "from torch._C import _autograd",
        "from torch.nn.modules.batchnorm import _BatchNorm",
        "torch._C._is_tracing()",
        "tensor._is_view()",
        "getattr(module, '_forward_hooks')",
        "name = 'torch._dynamo'",
    ],
)
def test_each_way_to_name_them_is_found(tmp_path, line):
    """Imports, attributes, ``getattr`` and names of modules as text."""
    path = tmp_path / "module.py"
    path.write_text(line)
    assert len(list(private_names(path, {"_own"}))) >= 1


def test_what_tracing_needs_does_not_import_torch():
    """Programs without torch are traced too."""
    code = "import pipesight._torch.compiling, pipesight._torch.data_loader, sys; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
