"""What the README and the documents say is true: their code runs, their commands and links exist.

A fenced block is one of these, and nothing else is let through:

    ```python    runs; the blocks of a file share their names, in order, as one script
    ```yaml      is a configuration of tensor statistics without a mistake
    ```toml      names entry points of features
    ```console   names commands that exist
    ```output    is what the Python block above it prints, or what the commands above it do
    ```text      is a drawing

A block whose first line is a comment with the name of a file, such as ``# train.py``, is that file. It lies in the
folder where everything else runs, and is no part of the script.
"""

from __future__ import annotations

import importlib
import os
import re
import shlex
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from itertools import pairwise, takewhile
from pathlib import Path

import pytest
from packaging.version import Version

import pipesight
import pipesight.stats.features  # registers them
from pipesight.cli import main
from pipesight.stats.config import load
from pipesight.stats.registry import ENTRY_POINTS, default_registry
from support import warm
from support.processes import STRICT_PYTHON

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
LINKED = [*DOCUMENTS, ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md"]
PUBLIC = [
    "pipesight",
    "pipesight.balance",
    "pipesight.context",
    "pipesight.distributed",
    "pipesight.logs",
    "pipesight.plan",
    "pipesight.recording",
    "pipesight.report",
    "pipesight.skip",
    "pipesight.stats",
    "pipesight.testing",
    "pipesight.trace",
]

documents = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
linked = pytest.mark.parametrize("document", LINKED, ids=lambda path: str(path.relative_to(ROOT)))

END_OF_BLOCK = "<end of the block in line {}>"


@dataclass(frozen=True, slots=True)
class Block:
    language: str
    line: int  # of its opening fence, from 1
    code: list[str]

    @property
    def file(self) -> str | None:
        """The name of the file that this block is."""
        named = re.fullmatch(r"# ([\w/]+\.(?:py|yaml|toml))", self.code[0]) if self.code else None
        return named[1] if named else None


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
    """Return the Python blocks of a document that are no files as one script, each line in the place it has there.

    In the place of a closing fence, the script says which block has ended.
    """
    lines = [""] * len(text.splitlines())
    for block in blocks(text):
        if block.language == "python" and not block.file:
            last = block.line + len(block.code)
            lines[block.line : last] = block.code
            lines[last] = f"print({END_OF_BLOCK.format(block.line)!r})"
    return "\n".join(lines)


def write_files(text: str, folder: Path) -> None:
    """Put the files that a document shows into a folder."""
    for block in blocks(text):
        if block.file:
            file = folder / block.file
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("\n".join([*block.code, ""]), encoding="utf-8")


def run(path: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the script of a document in a folder with its files, on the CPU, with warnings as errors.

    That of the README begins with Python itself, as a reader would; the others begin with torch imported. So does not
    one of DuckDB, which at the end counts what is left of it.
    """
    text = path.read_text(encoding="utf-8")
    write_files(text, folder)
    copy = folder / path.name
    copy.write_text(script(text), encoding="utf-8")
    surroundings = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONSAFEPATH": "1"}
    if path.name not in ("README.md", "large-runs.md"):
        return warm.run(copy.name, cwd=folder, env=surroundings, merge=True)
    command = [*STRICT_PYTHON, "-u", "-X", "utf8", copy.name]
    return subprocess.run(
        command, cwd=folder, env=surroundings, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120
    )


def execute(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a command of a console block in a folder, on the CPU."""
    program, *arguments = shlex.split(command)
    surroundings = {key: value for key, value in os.environ.items() if key != "COLUMNS"}
    surroundings |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    if program != "torchrun":
        beginning = {"python": [], "pipesight": ["-m", "pipesight"]}
        return warm.run(*beginning[program], *arguments, cwd=folder, env=surroundings)
    launch = [sys.executable, "-X", "utf8", "-m", "torch.distributed.run", *arguments]
    return subprocess.run(launch, cwd=folder, env=surroundings, capture_output=True, text=True, timeout=120)


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


def of_commands(text: str) -> dict[int, Block]:
    """Return the console blocks whose output a document shows, by the lines where the output begins."""
    return {
        below.line: block
        for block, below in pairwise(blocks(text))
        if (block.language, below.language) == ("console", "output")
    }


def anchors(text: str) -> set[str]:
    """Return the anchors that GitHub gives to the headings of a document."""
    headings = [line.lstrip("#").strip() for line in prose(text) if re.match(r"#+ ", line)]
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@linked
def test_no_code_escapes(document):
    """Every block says what it is, in the first column; no code is indented instead of fenced."""
    text = document.read_text(encoding="utf-8")
    assert {block.language for block in blocks(text)} <= {"python", "yaml", "toml", "output", "console", "text"}
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
        if block.language == "python" and not block.file:
            python = block
            shown[block.line], mark, rest = rest.partition(END_OF_BLOCK.format(block.line) + "\n")
            assert mark, f"the block in line {block.line} did not run"
        elif block.language == "output" and block.line not in of_commands(text):
            assert python is not None, f"the output in line {block.line} belongs to no block"
            # Partitions run side by side, so their lines come in any order.
            assert sorted(shown.pop(python.line).strip().splitlines()) == sorted(block.code)
    assert {line: output for line, output in shown.items() if output} == {}, "printed, but not shown"
    assert rest == ""


@documents
def test_commands_print_what_they_show(document, tmp_path):
    """The commands above an output run in a folder with the files of the document, and print it."""
    text = document.read_text(encoding="utf-8")
    write_files(text, tmp_path)
    for block in blocks(text):
        console = of_commands(text).get(block.line)
        if console is not None:
            ended = [execute(command, tmp_path) for command in console.code]
            assert [process.returncode for process in ended] == [0] * len(ended), [process.stderr for process in ended]
            printed = re.sub(r"(?m)^\[Gloo\] .*\n", "", "".join(process.stdout for process in ended))
            # Ranks run side by side, so their lines come in any order.
            assert sorted(printed.rstrip("\n").splitlines()) == sorted(block.code)


@documents
def test_configurations_are_right(document, tmp_path):
    """Every configuration of tensor statistics in a document can be read, with the features it shows."""
    text = document.read_text(encoding="utf-8")
    write_files(text, tmp_path)
    registry = default_registry().copy()
    registry.load_feature_dirs([folder for folder in [tmp_path / "features"] if folder.is_dir()])
    for block in blocks(text):
        if block.language == "yaml":
            file = tmp_path / f"line {block.line}.yaml"
            file.write_text("\n".join(block.code), encoding="utf-8")
            assert load(file, registry).sections


@documents
def test_entry_points_lead_to_features(document, tmp_path):
    """The entry points that a document shows are those that are looked for, and modules it shows."""
    text = document.read_text(encoding="utf-8")
    write_files(text, tmp_path)
    for block in blocks(text):
        if block.language == "toml":
            groups = tomllib.loads("\n".join(block.code))["project"]["entry-points"]
            assert list(groups) == [ENTRY_POINTS]
            for value in groups[ENTRY_POINTS].values():
                assert (tmp_path / f"{value.replace('.', '/')}.py").is_file(), value


@documents
def test_commands_exist(document, capsys):
    """Every command that a document names is there, with the options it names."""
    files = {block.file for block in blocks(document.read_text(encoding="utf-8"))}
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
            subcommand = takewhile(lambda argument: not argument.startswith("-"), arguments)
            assert main([*subcommand, "--help"]) == 0, command
            known = set(re.findall(r"--[\w-]+", capsys.readouterr().out))
            assert {argument for argument in arguments if argument.startswith("--")} <= known, command
        elif program == "pip":
            places = [argument for argument in arguments[1:] if argument.startswith(".")]
            assert arguments[0] in ("install", "uninstall")
            assert all((ROOT / place / "pyproject.toml").is_file() for place in places), command
        elif program in ("python", "torchrun"):
            check_script(arguments, ".py", files)
        elif program == "sbatch":
            check_script(arguments, ".sh", files)
        else:
            assert program in ("git", "cd"), f"no rule to check: {command}"


@documents
def test_commands_do_not_stand_in_each_others_way(document):
    """Commands can be followed from top to bottom, in one folder: each has its own folders, and the ranks it needs."""
    text = document.read_text(encoding="utf-8")
    files = {block.file: "\n".join(block.code) for block in blocks(text) if block.file}
    taken = set()
    for line in (line for block in blocks(text) if block.language == "console" for line in block.code):
        words = shlex.split(line, comments=True)
        given = {word: after for word, after in pairwise(words) if word.startswith("--")}
        for option in given.keys() & ({"--checkpoints"} if "--overwrite" in words else {"--out", "--checkpoints"}):
            assert (option, given[option]) not in taken, line
            taken.add((option, given[option]))
        if "--nproc-per-node" in given:
            balances = [re.search(r"balance=\[([\d, ]+)\]", files.get(word, "")) for word in words]
            sizes = {balance[1].count(",") + 1 for balance in balances if balance}
            assert sizes <= {int(given["--nproc-per-node"])}, line


def check_script(arguments, script, files):
    """A script is shown in the document, or is one of the examples, which know the options that follow it."""
    name, *options = arguments[next(k for k, argument in enumerate(arguments) if argument.endswith(script)) :]
    options = [option for option in options if option.startswith("--")]
    if name not in files:
        program = ROOT / name if script == ".py" else ROOT / "examples" / "distributed" / "train.py"
        assert program.with_name(Path(name).name).is_file(), name
        assert [option for option in options if f'"{option}"' not in program.read_text(encoding="utf-8")] == []


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
