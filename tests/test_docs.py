"""What the README and the documents say is true: their code runs, their commands and links exist.

A fenced block is one of these, and nothing else is let through:

    ```python    runs; the blocks of a file share their names, in order, as one script
    ```output    is what the Python block above it prints
    ```console   names commands that exist
    ```text      is a drawing
"""

from __future__ import annotations

import importlib
import os
import re
import shlex
import subprocess
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest
from packaging.version import Version

import pipesight
from pipesight.cli import main
from processes import STRICT_PYTHON

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
LINKED = [*DOCUMENTS, ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md"]
PUBLIC = [
    "pipesight",
    "pipesight.balance",
    "pipesight.context",
    "pipesight.logs",
    "pipesight.skip",
    "pipesight.testing",
    "pipesight.trace",
]

documents = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
linked = pytest.mark.parametrize("document", LINKED, ids=lambda path: path.name)

END_OF_BLOCK = "<end of the block in line {}>"


@dataclass(frozen=True, slots=True)
class Block:
    language: str
    line: int  # of its opening fence, from 1
    code: list[str]


def blocks(text: str) -> list[Block]:
    """Return the fenced blocks of a document."""
    found: list[Block] = []
    inside = False
    for number, line in enumerate(text.splitlines(), 1):
        if inside and line != "```":
            found[-1].code.append(line)
        elif line.lstrip().startswith(("```", "~~~")):
            inside = not inside
            if inside:
                found.append(Block(line.removeprefix("```"), number, []))
    assert not inside, f"the block in line {found[-1].line} has no end"
    return found


def prose(text: str) -> list[str]:
    """Return the lines of a document, with those of fenced blocks left blank."""
    lines = text.splitlines()
    for block in blocks(text):
        begin, end = block.line - 1, block.line + len(block.code) + 1
        lines[begin:end] = [""] * (end - begin)
    return lines


def script(text: str) -> str:
    """Return the Python blocks of a document as one script, each line in the place it has there.

    In the place of a closing fence, the script says which block has ended.
    """
    lines = [""] * len(text.splitlines())
    for block in blocks(text):
        if block.language == "python":
            last = block.line + len(block.code)
            lines[block.line : last] = block.code
            lines[last] = f"print({END_OF_BLOCK.format(block.line)!r})"
    return "\n".join(lines)


def run(path: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the script of a document in an empty folder, on the CPU, with warnings as errors."""
    copy = folder / path.name
    copy.write_text(script(path.read_text(encoding="utf-8")), encoding="utf-8")
    command = [*STRICT_PYTHON, "-u", "-X", "utf8", copy.name]
    surroundings = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONSAFEPATH": "1"}
    return subprocess.run(
        command, cwd=folder, env=surroundings, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120
    )


def commands(text: str) -> list[str]:
    """Return the commands of console blocks, and those of pipesight and make that the prose names."""
    found = [
        command.strip()
        for block in blocks(text)
        if block.language == "console"
        for line in block.code
        for command in line.partition(" # ")[0].split("&&")
    ]
    spans = re.findall(r"`([^`]+)`", "\n".join(prose(text)))
    return found + [span for span in spans if re.match(r"(\.venv/bin/)?(pipesight|make|pip) ", span)]


def anchors(text: str) -> set[str]:
    """Return the anchors that GitHub gives to the headings of a document."""
    headings = [line.lstrip("#").strip() for line in prose(text) if re.match(r"#+ ", line)]
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@linked
def test_no_code_escapes(document):
    """Every block says what it is, in the first column; no code is indented instead of fenced."""
    text = document.read_text(encoding="utf-8")
    assert {block.language for block in blocks(text)} <= {"python", "output", "console", "text"}
    if document in DOCUMENTS:
        assert [line for line in prose(text) if line.startswith(("    ", "\t"))] == []


@documents
def test_python_blocks_run_and_print_what_they_show(document, tmp_path):
    """The Python blocks of a document run, warnings are errors, and each prints the output shown below it."""
    text = document.read_text(encoding="utf-8")
    ended = run(document, tmp_path)
    assert ended.returncode == 0, ended.stdout
    rest, shown = re.sub(r"(?m)^\[Gloo\] .*\n", "", ended.stdout), {}  # torch 2.8 prints such a line itself
    python: Block | None = None
    for block in blocks(text):
        if block.language == "python":
            python = block
            shown[block.line], mark, rest = rest.partition(END_OF_BLOCK.format(block.line) + "\n")
            assert mark, f"the block in line {block.line} did not run"
        elif block.language == "output":
            assert python is not None, f"the output in line {block.line} belongs to no block"
            # Partitions run side by side, so their lines come in any order.
            assert sorted(shown.pop(python.line).strip().splitlines()) == sorted(block.code)
    assert {line: output for line, output in shown.items() if output} == {}, "printed, but not shown"
    assert rest == ""


@documents
def test_commands_exist(document, capsys):
    """Every command that a document names is there, with the options it names."""
    for command in commands(document.read_text(encoding="utf-8")):
        program, *arguments = shlex.split(command.replace("<", "'<").replace(">", ">'"))
        program = program.removeprefix(".venv/bin/")
        if program == "make":
            settings = {argument.partition("=")[0] for argument in arguments if "=" in argument}
            assert settings <= set(re.findall(r"^(\w+) *\?=", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
            arguments = [argument for argument in arguments if "=" not in argument]
            targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)
            assert set(arguments) <= set(targets), command
        elif program == "pipesight":
            subcommand = [argument for argument in arguments[:1] if not argument.startswith("-")]
            assert main([*subcommand, "--help"]) == 0, command
            known = set(re.findall(r"--\w+", capsys.readouterr().out))
            assert {argument for argument in arguments if argument.startswith("--")} <= known, command
        elif program == "pip":
            places = [argument for argument in arguments[1:] if argument.startswith(".")]
            assert arguments[0] in ("install", "uninstall")
            assert all((ROOT / place / "pyproject.toml").is_file() for place in places), command
        else:
            assert program in ("git", "cd"), f"no rule to check: {command}"


@linked
def test_links_resolve(document):
    """A link to a file or to a heading leads there."""
    text = document.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)\s]+)\)", "\n".join(prose(text))):
        if target.startswith("https://"):
            continue
        name, _, anchor = target.partition("#")
        file = (document.parent / name) if name else document
        assert file.exists(), target
        assert not anchor or anchor in anchors(file.read_text(encoding="utf-8")), target


@pytest.mark.parametrize("module", PUBLIC)
def test_public_names_exist_and_are_documented(module):
    """Every name that a public module offers is there, and the documents show it in code."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in DOCUMENTS)
    spans = re.findall(r"`[^`]+`", "\n".join(prose(text)))
    code = "\n".join([*spans, *(line for block in blocks(text) for line in block.code)])
    found = importlib.import_module(module)
    for name in found.__all__:
        assert hasattr(found, name)
        assert re.search(rf"(?<!\w){name}(?!\w)", code), name


def test_picture_is_one_of_this_demo():
    """The picture in the README is as wide as a terminal at most, and shows the model and layers of the demo."""
    from pipesight.demo.training import Training

    picture = next(b.code for b in blocks((ROOT / "README.md").read_text(encoding="utf-8")) if b.language == "text")
    assert max(map(len, picture)) <= 80
    training = Training(partitions=4, chunks=4, checkpoint="except_last", seed=0)
    assert picture[:3] == training.description.splitlines()
    for j, partition in enumerate(training.pipe.partitions):
        row = picture[j - 4].split()
        layers = {name: type(layer).__name__ for name, layer in partition.named_children()}
        assert row[:2] == [str(j), "cpu"]
        assert row[2] == "idle" or row[3] == layers[row[2]]


def test_readme_is_short():
    """The README has less than 200 lines."""
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) < 200


def test_changelog_tells_of_this_version():
    """The changelog has a section for what is not yet released; the next one is for the version at hand, or before."""
    headings = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.M)
    assert headings[0] == "Unreleased"
    if Version(pipesight.__version__).is_devrelease:
        assert Version(headings[1]) < Version(pipesight.__version__)
    else:
        assert headings[1] == pipesight.__version__


def test_versions_agree():
    """Package, shim and citation have one version."""
    shim = tomllib.loads((ROOT / "shims/torchgpipe/pyproject.toml").read_text(encoding="utf-8"))
    assert shim["project"]["version"] == pipesight.__version__
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert re.search(r"^version: (.+)$", citation, re.M)[1] == pipesight.__version__


def test_numpy_comes_along():
    """PyTorch warns at every start where there is no NumPy, so installing pipesight installs it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert "numpy" in project["dependencies"]
