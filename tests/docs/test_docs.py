"""What the README and the documents say is true: their code runs, their commands and links exist.

`documents` says what the blocks of a document are. Every page is followed from top to bottom in a fresh folder.
"""

from __future__ import annotations

import importlib
import inspect
import re
import runpy
import shlex
import tomllib
from itertools import takewhile
from pathlib import Path

import pytest
from packaging.version import Version

import pipesight
import pipesight.stats.builtin_features  # registers them
from pipesight.cli import main
from pipesight.stats.config import load
from pipesight.stats.registry import ENTRY_POINTS, default_registry
from support.documents import LANGUAGES, ROOT, Block, blocks, follow, prose, write_files
from support.torchrun import skip_old_torch

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
GENERATED = {"docs/reference/cli.md"}
"""Pages that only the site has: `make docs` writes them."""

NETWORK, MACHINES, SLURM, ENDLESS, MINUTES = "network", "machines", "SLURM", "until Ctrl-C", "minutes"
RECORDED = "tests/recording/test_torch_pipelines.py runs such programs"
NOT_RUN: dict[str, dict[str, str]] = {
    "README.md": {
        "git clone https://github.com/pipesight/pipesight && cd pipesight": NETWORK,
        "pip install .": NETWORK,
    },
    "docs/compatibility.md": {
        "make clients": NETWORK,
        'make clients CLIENTS="torchgpipe dftracer"': NETWORK,
    },
    "docs/how-to/from-dftracer.md": {
        "pip uninstall dftracer pydftracer": NETWORK,
        "pip install . ./shims/dftracer": NETWORK,
    },
    "docs/how-to/from-nvdlfw-inspect.md": {
        "pip uninstall nvdlfw_inspect": NETWORK,
        "pip install . ./shims/nvdlfw_inspect": NETWORK,
    },
    "docs/how-to/from-torchgpipe.md": {
        "pip uninstall torchgpipe": NETWORK,
        "pip install . ./shims/torchgpipe": NETWORK,
    },
    "docs/how-to/several-nodes.md": {
        "torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint host:29500 "
        "examples/distributed/train.py --blocks 14 --chunks 16 --checkpoints gpt16": MACHINES,
        "cd examples/distributed": SLURM,
        "sbatch slurm.sh --steps 1000 --blocks 14 --chunks 16": SLURM,
    },
    "docs/how-to/torch-pipelines.md": {
        "torchrun --nproc-per-node 2 -m pipesight run --out RUN train.py": RECORDED,
        "pipesight report RUN": RECORDED,
        "pipesight report profiles/": RECORDED,
    },
    "docs/how-to/watch.md": {
        "pipesight view RUN": ENDLESS,
        "pipesight view RUN --no-browser --port 8765": ENDLESS,
        "ssh -L 8765:127.0.0.1:8765 training-machine": MACHINES,
        "pipesight view RUN --no-browser --port 8765 --token-file token": ENDLESS,
    },
    "docs/tutorials/first-pipeline.md": {
        "git clone https://github.com/pipesight/pipesight": NETWORK,
        "python3 -m venv venv": NETWORK,
        ". venv/bin/activate": NETWORK,
        "pip install torch --index-url https://download.pytorch.org/whl/cpu": NETWORK,
        "cd pipesight && pip install . && cd ..": NETWORK,
    },
    "docs/tutorials/several-processes.md": {
        "torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint first:29500 train.py": MACHINES,
    },
    "docs/tutorials/your-own-model.md": {
        "pip install transformers": NETWORK,
        "python gpt2.py": NETWORK,
    },
    "docs/reference/reliability.md": {
        "make fuzz": MINUTES,
        "make fuzz CASES=10000 ONLY=test_engine": MINUTES,
    },
}
"""The commands of shell blocks, which no test runs, by page, with what they need."""
TWICE = {"README.md", "docs/tutorials/several-processes.md"}
"""Pages that are followed once more in the same folder: they record a run in each way that there is."""


documents = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
linked = pytest.mark.parametrize("document", LINKED, ids=lambda path: path.relative_to(ROOT).as_posix())

CODE = re.compile(
    r"\s*(\.venv/bin/)?(pipesight|python|torchrun|pip|make|git|sbatch|ssh) "
    r"|(import|def|class) |from \S+ import |with .*:$"
)
"""How a line of code or a command begins."""


def commands(text: str) -> list[str]:
    """Return the commands of console blocks, and those of pipesight and make that the prose names."""
    found = [
        command.strip()
        for block in blocks(text)
        if block.language in ("console", "shell")
        for line in block.code
        for command in re.sub(r"^(\w+=\S* )+", "", line.partition(" # ")[0]).split("&&")
    ]
    spans = re.findall(r"`([^`]+)`", "\n".join(prose(text)))
    return found + [span for span in spans if re.match(r"(\.venv/bin/)?(pipesight|make|pip) ", span)]


def anchors(text: str) -> set[str]:
    """Return the anchors that GitHub gives to the headings of a document."""
    headings = [line.lstrip("#").strip() for line in prose(text) if re.match(r"#+ ", line)]
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@linked
def test_no_code_escapes(document):
    """Every block says what it is, in the first column; no code is indented, nor called a drawing."""
    text = document.read_text(encoding="utf-8")
    assert {block.language for block in blocks(text)} <= LANGUAGES
    if document in DOCUMENTS:
        assert [line for line in prose(text) if line.startswith(("    ", "\t"))] == []
        drawings = [block for block in blocks(text) if block.language == "text"]
        assert [line for block in drawings for line in block.code if CODE.match(line)] == []


@documents
def test_pages_can_be_followed(document, tmp_path):
    """Every block runs, in order, and prints the output shown below it; of some, once more what writes files."""
    done: set[str] = set()
    code = "\n".join(line for block in of(document, "python", "console") for line in block.code)
    if re.search(r"(pipesight\.|examples/)distributed", code):
        skip_old_torch()
    printed = follow(document, tmp_path, done=done)
    last: Block | None = None
    for block in blocks(document.read_text(encoding="utf-8")):
        if block.language == "output":
            assert last is not None, f"the output in line {block.line} belongs to no block"
            # Partitions and ranks run side by side, so their lines come in any order.
            assert sorted(said(printed.pop(last.line))) == sorted(block.code)
        elif block.line in printed:
            last = block
    # Reports are long, and need not be shown.
    script = {block.line for block in blocks(document.read_text(encoding="utf-8")) if block.is_script}
    assert {line: output for line, output in printed.items() if output and line in script} == {}, "not shown"
    if document.relative_to(ROOT).as_posix() in TWICE:
        follow(document, tmp_path, done=done)


def said(printed: str) -> list[str]:
    """Return the lines that were printed, without those of torch 2.8 about gloo."""
    return [line for line in printed.strip("\n").splitlines() if not line.startswith("[Gloo] ")]


def test_only_these_commands_are_not_run():
    """Shell blocks are the only commands that no test runs; each is listed here, with what it needs."""
    found = {
        document.relative_to(ROOT).as_posix(): [line for block in of(document, "shell") for line in block.code]
        for document in DOCUMENTS
        if of(document, "shell")
    }
    assert found == {page: list(lines) for page, lines in NOT_RUN.items()}


def of(document: Path, *languages: str) -> list[Block]:
    """Return the blocks of a document in these languages."""
    return [block for block in blocks(document.read_text(encoding="utf-8")) if block.language in languages]


@documents
def test_files_are_python(document):
    """Every Python file that a page shows can be compiled, also where the page does not run it."""
    for block in of(document, "python"):
        compile("\n".join(block.code), f"{document.name}:{block.line}", "exec")


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
            assert program in ("git", "cd", "ssh", "python3", "."), f"no rule to check: {command}"


def check_script(arguments, script, files):
    """A script is shown in the document, or is one of the examples, which know the options that follow it."""
    name, *options = arguments[next(k for k, argument in enumerate(arguments) if argument.endswith(script)) :]
    options = [option for option in options if option.startswith("--")]
    if name not in files:
        program = ROOT / name if script == ".py" else ROOT / "examples" / "distributed" / "train.py"
        assert program.with_name(Path(name).name).is_file(), name
        assert [option for option in options if f'"{option}"' not in program.read_text(encoding="utf-8")] == []


def test_the_site_lists_every_page():
    """The menu of the site and its first page lead to every page, the menu to no other."""
    listed = set(re.findall(r"^ +- (?:.+: )?(\S+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.M))
    pages = {document.relative_to(ROOT / "docs").as_posix() for document in DOCUMENTS[1:]}
    assert listed - pages == {Path(page).relative_to("docs").as_posix() for page in GENERATED}
    assert pages - listed == set()
    first_page = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    assert [page for page in listed if f"]({page})" not in first_page] == ["index.md"]


def test_pictures_are_drawn():
    """The diagrams are what docs/pictures/draw.py draws, with the schedules as they are."""
    folder = ROOT / "docs" / "pictures"
    drawing = runpy.run_path(str(folder / "draw.py"))
    for name, draw in drawing["PICTURES"].items():
        assert (folder / f"{name}.svg").read_text(encoding="utf-8") == draw().svg(), "run docs/pictures/draw.py"


@linked
def test_links_resolve(document):
    """A link to a file or to a heading leads there."""
    text = document.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)\s]+)\)", "\n".join(prose(text))):
        if target.startswith("https://"):
            continue
        name, _, anchor = target.partition("#")
        file = (document.parent / name) if name else document
        if file.resolve().relative_to(ROOT).as_posix() in GENERATED:
            continue
        assert file.exists(), target
        assert not anchor or anchor in anchors(file.read_text(encoding="utf-8")), target


@documents
def test_pages_are_short(document):
    """A page has one reader, and at most 300 lines, the README 119; what is written by a program may have more."""
    if document.name != "benchmarks.md":
        most = 119 if document.name == "README.md" else 300
        assert len(document.read_text(encoding="utf-8").splitlines()) <= most


@pytest.mark.parametrize("module", PUBLIC)
def test_public_names_are_documented(module):
    """Every name that a public module offers is there and has a docstring, and the reference has a page of them."""
    page = ROOT / "docs" / "reference" / "api" / f"{module.removeprefix('pipesight.')}.md"
    assert f"::: {module}\n" in page.read_text(encoding="utf-8")
    found = importlib.import_module(module)
    for name in found.__all__:
        value = getattr(found, name)
        if inspect.isclass(value) or inspect.isroutine(value):
            assert inspect.getdoc(value), name


def test_changelog_tells_of_this_version():
    """The first release in the changelog is the version at hand, or before it while that is being developed."""
    headings = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.M)
    released = [heading for heading in headings if heading != "Unreleased"]
    if Version(pipesight.__version__).is_devrelease:
        assert headings[0] == "Unreleased"
        assert Version(released[0]) < Version(pipesight.__version__)
    else:
        assert released[0] == pipesight.__version__


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
