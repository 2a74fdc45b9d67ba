"""`pipesight stats check`: what a configuration selects, as a table."""

import os
import re
import textwrap

import pytest

from pipesight.cli._stats_selection_table import fold
from support import warm
from support.commands import pipesight

FEATURES = """\
from pipesight.stats.registry import register_feature

@register_feature()
class Watch:
    '''Watches tensors.'''

    keys = frozenset({"tensors", "tensors_struct", "stats", "freq", "start_step", "end_step", "on_nonfinite"})
    statistics = dict.fromkeys(["min", "max", "mean", "std", "l1_norm", "l2_norm", "max_blockwise_dynamic_range"])

@register_feature(namespace="engine")
class Log:
    '''Logs tensors.'''
"""

MODEL = """\
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn, self.fc1, self.fc2 = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x):
        return self.fc2(self.fc1(self.attn(x)))

def plain():
    return nn.Sequential(*(Block() for _ in range(4)), nn.Linear(2, 2))

def pipeline():
    from pipesight import GPipe
    return GPipe(plain(), [2, 3], chunks=2)

class Inside:
    made = plain()

def fails():
    raise RuntimeError("no weights\\nhere")

def leaves():
    raise SystemExit(3)

def makes_nothing():
    return None

number = 3
"""

CONFIG = """\
mlp:
  enabled: true
  layers:
    layer_types: [fc1, fc2]
    layer_numbers: [0, 1, 3]
  Watch:
    enabled: true
    stats: [min, max, mean, std, l1_norm, l2_norm, {max_blockwise_dynamic_range: {block_size: 16}}]
    freq: 10
    on_nonfinite: warn
    tensors_struct:
      - tensor: activation
      - tensor: gradient
      - tensor: weight
        stats: [mean]
        start_step: 100
rest:
  enabled: true
  layers: {exact_layer_names: ["4", 2.atn], layer_types: [fc1]}
  engine:
    Log:
      enabled: true
      gemms_struct:
        - {gemm: fprop, tensors: [activation], stats: [odd]}
  Watch: {enabled: false, tensors: all, stats: [min]}
nowhere:
  enabled: true
  layers: {layer_types: [conv]}
  Watch: {enabled: true, tensors: all, stats: [min]}
later:
  enabled: false
  layers: {layer_types: all}
  Watch: {enabled: true, tensors: all, stats: [min]}
"""


@pytest.fixture
def check(tmp_path):
    """Run the command in a folder with a configuration, features and models."""
    (tmp_path / "features").mkdir()
    (tmp_path / "features" / "watch.py").write_text(FEATURES)
    (tmp_path / "models.py").write_text(MODEL)
    (tmp_path / "config.yaml").write_text(CONFIG)

    def check(*args, columns=None, config=None):
        if config is not None:
            (tmp_path / "config.yaml").write_text(config)
        command = ["stats", "check", *args]
        if "--feature-dir" not in args:
            command += ["--feature-dir", "features"]
        environment = {"COLUMNS": str(columns or "")}
        if "--model" in args:  # whose modules are imported
            return warm.run("-m", "pipesight", *command, cwd=tmp_path, env={**os.environ, **environment})
        return pipesight(*command, cwd=tmp_path, env=environment)

    return check


EXPECTED = """\
mlp (line 1): 6 layers
  selects names with fc1 or fc2 and numbers 0-1, 3
  layer {0-1,3}.fc1 (3)
  layer {0-1,3}.fc2 (3)

  feature  tensors         statistics                   steps           NaN, Inf
  Watch    activation,     min, max, mean, std,         every 10 steps  warn
           gradient        l1_norm, l2_norm,
                           max_blockwise_dynamic_range
                           (block_size 16 dims 1)
  Watch    weight          mean                         every 10        warn
                                                        steps, 100 on

rest (line 17): 1 layer
  selects the names 2.atn, 4
  note: layer_types is not used, as another selector decides
  layer 4
  warning: no layer is called '2.atn'; did you mean '2.attn'?

  feature     tensors            statistics  steps
  engine Log  fprop: activation  odd         every step
  Watch       disabled

nowhere (line 26): 0 layers
  selects names with conv
  warning: selects no layer of this model

  feature  tensors  statistics  steps
  Watch    all      min         every step

later (line 30): disabled

7 of 17 layers selected, 10 by no section
"""


@pytest.mark.parametrize("model", ["plain", "pipeline", "Inside.made"])
def test_layers_of_a_model(check, model):
    """The table says what each section selects of a model, a pipeline or a module object, by its own names."""
    ended = check("config.yaml", "--model", f"models:{model}", columns=80)
    assert ended.stderr == ""
    assert ended.stdout == EXPECTED
    assert ended.returncode == 0


def test_without_a_model_the_rules_are_printed(check):
    """Without a model there are rules and no layers; a pipe without a width gets whole lines."""
    ended = check("config.yaml")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "mlp (line 1)\n  selects names with fc1 or fc2 and numbers 0-1, 3\n\n" in ended.stdout
    (row,) = (line for line in ended.stdout.splitlines() if "max_blockwise_dynamic_range" in line)
    assert re.split(" {2,}", row.strip()) == [
        "Watch",
        "activation, gradient",
        "min, max, mean, std, l1_norm, l2_norm, max_blockwise_dynamic_range (block_size 16 dims 1)",
        "every 10 steps",
        "warn",
    ]
    assert "\x1b" not in ended.stdout
    assert ended.stdout.endswith("to see which layers are selected, add --model module:factory\n")


@pytest.mark.parametrize("columns", [30, 80, 160])
def test_lines_fit(check, columns):
    """No line is longer than the terminal is wide, and none ends in spaces."""
    lines = check("config.yaml", columns=columns).stdout.splitlines()
    assert max(map(len, lines)) <= columns
    assert not [line for line in lines if line != line.rstrip()]
    words = " ".join(lines).replace(" ", "")
    for word in ("Watch", "mean", "warn") if columns == 30 else ("activation", "max_blockwise_dynamic_range"):
        assert word in words


def test_tensors_that_watch_does_not_have(check):
    """With a model, names that watch() does not log are warned about; without one, they may be the user's own."""
    text = CONFIG.replace("tensor: gradient", "tensor: wgrads")
    warning = (
        "  warning: watch() has no tensor 'wgrads'; did you mean 'wgrad'?; log it yourself with log_tensor_stats\n"
    )
    assert check("config.yaml", "--model", "models:plain", config=text).stdout.count(warning) == 1
    assert "wgrad'" not in check("config.yaml", config=text).stdout


def test_a_layer_of_two_sections_is_an_error(check):
    """Layers that two sections select are all named, and that is an error."""
    text = CONFIG.replace("layer_types: [conv]", "layer_types: ['0.fc']")
    ended = check("config.yaml", "--model", "models:plain", config=text)
    assert ended.returncode == 1
    assert ended.stdout == ""
    assert ended.stderr == textwrap.dedent("""\
        2 mistakes in the configuration config.yaml:
          config.yaml:26: layer '0.fc1' is selected by the sections 'mlp' (line 1) and 'nowhere' (line 26); change the \
layers of one, or set enabled: false in it
          config.yaml:26: layer '0.fc2' is selected by the sections 'mlp' (line 1) and 'nowhere' (line 26); change the \
layers of one, or set enabled: false in it
    """)


def test_mistakes_are_printed_without_a_traceback(check):
    """All mistakes are printed, each with its line, and that is exit code 1."""
    text = CONFIG.replace("freq: 10", "freq: 0").replace("stats: [mean]", "stats: [maen]")
    ended = check("config.yaml", config=text)
    assert ended.returncode == 1
    assert ended.stdout == ""
    assert ended.stderr == (
        "2 mistakes in the configuration config.yaml:\n"
        "  config.yaml:9: mlp.Watch.freq: must be an integer of 1 or more (freq: 0)\n"
        "  config.yaml:15: mlp.Watch.tensors_struct[2].stats[0]: 'maen' is not a statistic of this feature; "
        "did you mean 'mean'?\n"
    )


@pytest.mark.parametrize(
    ("args", "error"),
    [
        (["none.yaml"], "no such configuration; correct the path (none.yaml)\n"),
        ([""], "CONFIG must be the path of a file"),
        (["config.yaml", "--feature-dir", "none"], "feature_dirs must be existing folders (missing: none)"),
        (["config.yaml", "--feature-dir", "."], "cannot load the features in "),
        (["config.yaml", "--model", "models"], "--model must be module:factory, such as train:build_model"),
        (
            ["config.yaml", "--model", "nomodels:x"],
            "--model nomodels:x: cannot import 'nomodels': ModuleNotFoundError: ",
        ),
        (
            ["config.yaml", "--model", "models:plian"],
            "--model models:plian: no attribute 'plian'; did you mean 'plain'?",
        ),
        (
            ["config.yaml", "--model", "models.py:plain"],
            "--model needs the name of a module, without .py (--model models.py:plain); write --model models:plain\n",
        ),
        (
            ["config.yaml", "--model", "./src/models.py:plain"],
            "--model needs the name of a module, without .py (--model ./src/models.py:plain); "
            "write --model src.models:plain\n",
        ),
        (
            ["config.yaml", "--model", "/src/models.py:plain"],
            "--model needs the name of a module, without .py (--model /src/models.py:plain); "
            "write --model models:plain, in /src\n",
        ),
        (["config.yaml", "--model", "models:number"], "--model must name a function or a module"),
        (["config.yaml", "--model", "models:fails"], "--model models:fails failed: RuntimeError: no weights here ("),
        (["config.yaml", "--model", "models:leaves"], "--model models:leaves failed: SystemExit: 3 ("),
        (["config.yaml", "--model", "models:makes_nothing"], "--model must return an nn.Module"),
    ],
)
def test_what_cannot_be_checked_is_told_in_one_line(check, tmp_path, args, error):
    """A missing file, folder or model ends with code 2 and one line."""
    (tmp_path / "fails.py").write_text("import no_such_module\n")
    ended = check(*args)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith(f"pipesight stats check: error: {error}")
    assert ended.stderr.count("\n") == 1


def test_missing_arguments(check):
    """A command without its file ends with code 2 and one line."""
    ended = check()
    assert ended.returncode == 2
    assert ended.stderr == "pipesight stats check: error: the following arguments are required: CONFIG\n"


def test_torch_is_imported_for_models_alone(tmp_path, check):
    """Checking rules does not wait for torch."""
    (tmp_path / "torch.py").write_text("raise AssertionError('torch was imported')\n")
    ended = check("config.yaml")
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.parametrize(
    ("names", "folded"),
    [
        ([], []),
        (["a", "b.c"], [("a", 1), ("b.c", 1)]),
        (["l.0.x", "l.1.x", "l.2.x", "l.7.x", "head"], [("l.{0-2,7}.x", 4), ("head", 1)]),
        ([f"l.{i}.e.{j}" for i in range(3) for j in range(4)], [("l.{0-2}.e.{0-3}", 12)]),
        (["l.0.e.0", "l.0.e.1", "l.1.e.5"], [("l.0.e.{0-1}", 2), ("l.1.e.5", 1)]),
        (["l.01", "l.1"], [("l.01", 1), ("l.1", 1)]),
    ],
)
def test_names_are_folded(names, folded):
    """Names that differ in their numbers are written as one."""
    assert fold(names) == folded


def test_built_in_features_are_known(check):
    """The features there are from the start need no folder."""
    text = """\
all:
  enabled: true
  layers: {layer_types: all}
  LogTensorStats: {enabled: true, tensors: all, stats: [min, l2_nrm]}
  transformer_engine:
    LogFp8TensorStats: {enabled: true, tensors: all, stats: [underflows%]}
"""
    ended = check("config.yaml", config=text)
    assert ended.stderr == (
        "1 mistake in the configuration config.yaml:\n"
        "  config.yaml:4: all.LogTensorStats.stats[1]: 'l2_nrm' is not a statistic of this feature; "
        "did you mean 'l2_norm'?\n"
    )
    ended = check("config.yaml", config=text.replace("l2_nrm", "l2_norm"))
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "transformer_engine LogFp8TensorStats" in ended.stdout
