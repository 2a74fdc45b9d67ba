"""The API of statistics: sessions, calls, features of the user's, and what is left behind."""

import gc
import inspect
import logging
import os
import textwrap
import threading
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import pipesight.stats as debug_api
from pipesight.stats import BaseLogger, ConfigError
from pipesight.stats.api import open_session
from support import warm
from support.logged import SIX, assert_six, config, lines, six, values


@pytest.fixture(autouse=True)
def _ended():
    yield
    debug_api.end_debug()


class Logger(BaseLogger):
    def __init__(self):
        self.seen = []

    def log_scalar(self, name, value, iteration, **kwargs):
        self.seen.append((name, value, iteration))


class Writer:
    def __init__(self):
        self.seen = []

    def add_scalar(self, tag, scalar_value, global_step=None):
        self.seen.append((tag, scalar_value, global_step))

    def flush(self):
        pass


def tree(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


# Signatures


def test_signatures():
    """The functions take what code written for nvdlfw_inspect passes."""
    initialize = inspect.signature(debug_api.initialize).parameters
    assert [(name, p.default) for name, p in initialize.items() if p.kind is not p.VAR_KEYWORD] == [
        ("config_file", ""),
        ("feature_dirs", None),
        ("statistics_logger", None),
        ("log_dir", "."),
        ("init_training_step", 0),
        ("tb_writer", None),
        ("default_logging_enabled", False),
    ]
    assert initialize["kwargs"].kind is inspect.Parameter.VAR_KEYWORD
    log = inspect.signature(debug_api.log_tensor_stats).parameters
    assert [(name, p.default) for name, p in log.items()][:6] == [
        ("layer_name", inspect.Parameter.empty),
        ("tensor", inspect.Parameter.empty),
        ("tensor_name", inspect.Parameter.empty),
        ("iteration", None),
        ("skip_reduction", False),
        ("reduction_group", None),
    ]


# Sessions


def test_not_initialized():
    """Without a session a call is an error that says what to do; step and end_debug do nothing."""
    with pytest.raises(RuntimeError, match=r"initialize\("):
        debug_api.log_tensor_stats("fc1", tensor=torch.ones(2), tensor_name="activation")
    with pytest.raises(RuntimeError, match=r"initialize\("):
        debug_api.log_message("hello")
    debug_api.step()
    debug_api.end_debug()


def test_initialize_twice(tmp_path):
    """A second initialize is an error, and the first session goes on."""
    debug_api.initialize(config(stats=["mean"]), log_dir=tmp_path / "a")
    with pytest.raises(RuntimeError, match=r"end_debug\(\)"):
        debug_api.initialize(config(), log_dir=tmp_path / "b")
    assert not (tmp_path / "b").exists()
    debug_api.log_tensor_stats("fc1", tensor=torch.tensor([1.0, 3.0]), tensor_name="activation")
    debug_api.end_debug()
    assert values(tmp_path / "a") == {(0, "fc1", "activation", "mean"): 2.0}


def bad_feature_dir(tmp_path):
    (tmp_path / "features").mkdir()
    (tmp_path / "features" / "broken.py").write_text(
        "import pipesight.stats as s\n@s.register_feature()\nclass Half: pass\nraise KeyError('no')\n"
    )
    return {"feature_dirs": tmp_path / "features"}


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (lambda tmp: {"config_file": {"s": {"enabled": "yes"}}}, ConfigError),
        (lambda tmp: {"config_file": tmp / "missing.yaml"}, FileNotFoundError),
        (lambda tmp: {"feature_dirs": tmp / "missing"}, FileNotFoundError),
        (bad_feature_dir, ImportError),
        (lambda tmp: {"tb_writer": object()}, TypeError),
        (lambda tmp: {"statistics_logger": object()}, TypeError),
        (lambda tmp: {"statistics_logger": Logger}, TypeError),
        (lambda tmp: {"statistics_logger": [Logger(), 3]}, TypeError),
        (lambda tmp: {"sinks": [object()]}, TypeError),
        (lambda tmp: {"init_training_step": -1}, ValueError),
        (lambda tmp: {"init_training_step": "1"}, ValueError),
        (lambda tmp: {"reduction_timeout": 0}, ValueError),
        (lambda tmp: {"log_file": "x"}, TypeError),
    ],
)
def test_a_failed_initialize_leaves_nothing(arguments, error, tmp_path):
    """After a failed initialize there is no session, no file and no feature; the next one works."""
    features = debug_api.list_features()
    out = tmp_path / "out"
    with pytest.raises(error):
        debug_api.initialize(**{"config_file": config(), "log_dir": out, **arguments(tmp_path)})
    assert not out.exists()
    assert debug_api.list_features() == features
    with pytest.raises(RuntimeError, match="not initialized"):
        debug_api.log_tensor_stats("fc1", tensor=torch.ones(2), tensor_name="activation")
    debug_api.initialize(config(stats=["max"]), log_dir=out)
    debug_api.log_tensor_stats("fc1", tensor=torch.ones(2), tensor_name="activation")
    debug_api.end_debug()
    assert values(out) == {(0, "fc1", "activation", "max"): 1.0}


def test_an_unwritable_folder_does_not_end_the_training(tmp_path, capsys):
    """Where no file can be made, each is reported once and training goes on."""
    (tmp_path / "file").write_text("")
    debug_api.initialize(config(), log_dir=tmp_path / "file")
    for _ in range(5):
        debug_api.log_tensor_stats("fc1", tensor=torch.ones(2), tensor_name="activation")
        debug_api.step()
    debug_api.end_debug()
    error = capsys.readouterr().err
    assert error.count("cannot write the log") == 1
    assert error.count("training continues") == 2  # the file and the JSON lines
    assert "30 values in all" in error


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_does_not_end_the_training(tmp_path, capsys):
    """A sink with no space left is reported once; the others get every value."""
    (tmp_path / "stats").mkdir()
    (tmp_path / "stats" / "rank-00000.jsonl").symlink_to("/dev/full")
    logger = Logger()
    debug_api.initialize(config(stats=["mean"]), log_dir=tmp_path, statistics_logger=logger)
    for i in range(4):
        debug_api.log_tensor_stats("fc1", tensor=torch.full((2,), float(i)), tensor_name="activation")
        debug_api.step()
    assert [value for _, value, _ in logger.seen] == [0.0, 1.0, 2.0, 3.0]
    assert capsys.readouterr().err.count("No space left") == 1


def test_after_end_debug_old_files_stay_as_they_are(tmp_path):
    """A new session writes nothing into the files of the last one."""
    for folder, number in (("a", 1.0), ("b", 2.0)):
        debug_api.initialize(config(stats=["mean"]), log_dir=tmp_path / folder)
        debug_api.log_tensor_stats("fc1", tensor=torch.full((3,), number), tensor_name="activation")
        debug_api.log_message(f"in {folder}")
        debug_api.step()
        debug_api.end_debug()
        if folder == "a":
            before = {name: (tmp_path / name).read_bytes() for name in tree(tmp_path) if (tmp_path / name).is_file()}
            assert len(before) == 3
    assert before == {name: (tmp_path / name).read_bytes() for name in before}
    assert values(tmp_path / "b") == {(0, "fc1", "activation", "mean"): 2.0}


def test_no_log_dir(tmp_path, monkeypatch):
    """A log_dir of None is the working folder, as in launch scripts that pass on what they were given."""
    monkeypatch.chdir(tmp_path)
    debug_api.initialize(config(), log_dir=None)
    debug_api.end_debug()
    assert (tmp_path / "nvdlfw_inspect_logs").is_dir()


def test_nothing_to_log(tmp_path):
    """Without a configuration calls return nothing and no statistics file appears."""
    debug_api.initialize(log_dir=tmp_path)
    assert debug_api.log_tensor_stats("fc1", tensor=torch.ones(2), tensor_name="activation") == {}
    debug_api.step()
    debug_api.end_debug()
    assert tree(tmp_path) == ["nvdlfw_inspect_logs", "nvdlfw_inspect_logs/nvdlfw_inspect_globalrank-0.log"]


# Steps


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        ({}, list(range(12))),
        ({"freq": 3}, [0, 3, 6, 9]),
        ({"freq": 2, "start_step": 3, "end_step": 8}, [4, 6, 8]),
        ({"start_end_list": [[1, 3], [7, 9]]}, [1, 2, 7, 8]),
    ],
)
@pytest.mark.parametrize("explicit", [False, True])
def test_step_rules_at_the_logger(rules, expected, explicit, tmp_path):
    """The logger sees the steps that the rules include, counted by step() or passed by the caller."""
    logger = Logger()
    debug_api.initialize(config(stats=["max"], **rules), statistics_logger=logger, log_dir=tmp_path)
    for i in range(12):
        result = debug_api.log_tensor_stats(
            "fc1", tensor=torch.full((2,), float(i)), tensor_name="activation", iteration=i if explicit else None
        )
        assert bool(result) == (i in expected)
        if not explicit:
            debug_api.step()
    debug_api.end_debug()
    assert logger.seen == [("fc1_activation_max", float(i), i) for i in expected]


def test_first_step(tmp_path):
    """The counter begins where initialize or initialize_training_step says."""
    debug_api.initialize(config(stats=["max"]), log_dir=tmp_path, init_training_step=7)
    debug_api.log_tensor_stats("fc1", tensor=torch.ones(1), tensor_name="activation")
    debug_api.step()
    debug_api.initialize_training_step(100)
    debug_api.log_tensor_stats("fc1", tensor=torch.ones(1), tensor_name="activation")
    debug_api.step()
    assert [key[0] for key in values(tmp_path)] == [7, 100]


def test_an_iteration_may_be_a_tensor_or_a_numpy_number(tmp_path):
    """What stands for an integer is taken for one."""
    debug_api.initialize(config(stats=["max"], freq=2), log_dir=tmp_path)
    for iteration in (torch.tensor(2), torch.tensor(3).numpy()[()], 4):
        debug_api.log_tensor_stats("a", tensor=torch.ones(1), tensor_name="activation", iteration=iteration)
    debug_api.end_debug()
    assert [key[0] for key in values(tmp_path)] == [2, 4]


@pytest.mark.parametrize("explicit", [False, True])
@settings(max_examples=20, deadline=None)
@given(sizes=st.lists(st.integers(0, 50), min_size=1, max_size=5), seed=st.integers(0, 1000))
def test_calls_of_one_iteration_merge(explicit, tmp_path_factory, sizes, seed):
    """Gradient accumulation gives one value, that of all pieces taken together."""
    folder = tmp_path_factory.mktemp("run")
    generator = torch.Generator().manual_seed(seed)
    pieces = [torch.randn(size, generator=generator) * 3 + 5 for size in [*sizes, 2]]
    debug_api.initialize(config(), log_dir=folder)
    try:
        for piece in pieces:
            debug_api.log_tensor_stats("fc1", tensor=piece, tensor_name="activation", iteration=4 if explicit else None)
    finally:
        debug_api.end_debug()
    assert_six(values(folder), 4 if explicit else 0, "fc1", "activation", *pieces)


def test_iterations_without_step_are_logged_as_they_pass(tmp_path):
    """A loop that passes iterations need not call step(): a new iteration ends the last one."""
    debug_api.initialize(config(stats=["max"]), log_dir=tmp_path)
    for i in range(3):
        debug_api.log_tensor_stats("fc1", tensor=torch.full((1,), float(i)), tensor_name="activation", iteration=i)
        assert len(lines(tmp_path)) == i
    debug_api.end_debug()
    assert len(lines(tmp_path)) == 3


def test_passed_iterations_and_step(tmp_path):
    """Who passes iterations and calls step() too gets each value once."""
    debug_api.initialize(config(stats=["max"]), log_dir=tmp_path)
    for i in range(1000, 1003):
        for _ in range(2):
            debug_api.log_tensor_stats("fc1", tensor=torch.ones(1), tensor_name="activation", iteration=i)
        debug_api.step()
        assert len(lines(tmp_path)) == i - 999
    assert [key[0] for key in values(tmp_path)] == [1000, 1001, 1002]


# Values


def test_return_value(tmp_path):
    """A call returns the statistics of its own tensor as 0-d float64 tensors."""
    debug_api.initialize(config(), log_dir=tmp_path)
    debug_api.log_tensor_stats("fc1", tensor=torch.zeros(9), tensor_name="activation")
    x = torch.randn(1000) * 3 + 100
    result = debug_api.log_tensor_stats("fc1", tensor=x, tensor_name="activation")
    assert list(result) == SIX
    for name, expected in six(x).items():
        assert result[name].dtype == torch.float64
        assert result[name].shape == ()
        assert result[name].item() == pytest.approx(expected, rel=1e-6)
    assert debug_api.log_tensor_stats("fc1", tensor=x, tensor_name="gradient") == {}
    with pytest.raises(KeyError):
        result["median"]


def test_all_loggers_get_plain_floats(tmp_path):
    """Loggers, TensorBoard, sinks and the files are served at once, each with Python's own numbers."""

    class Keeps:
        def __init__(self):
            self.records = []

        def write(self, records):
            self.records += records

        def close(self):
            self.records.append("closed")

    loggers, writer, sink = [Logger(), Logger()], Writer(), Keeps()
    debug_api.initialize(
        config(stats=["mean"]),
        statistics_logger=loggers,
        tb_writer=writer,
        default_logging_enabled=True,
        sinks=[sink],
        log_dir=tmp_path,
    )
    debug_api.log_tensor_stats("fc1", tensor=torch.tensor([1, 4]), tensor_name="activation")
    debug_api.step()
    debug_api.end_debug()
    expected = [("fc1_activation_mean", 2.5, 0)]
    assert loggers[0].seen == loggers[1].seen == expected
    assert writer.seen == [("fc1/activation/mean", 2.5, 0)]
    assert all(type(value) is float and type(i) is int for _, value, i in loggers[0].seen + writer.seen)
    assert type(sink.records[0].value) is float
    assert sink.records[1:] == ["closed"]
    file = tmp_path / "nvdlfw_inspect_statistics_logs" / "nvdlfw_inspect_globalrank-0.log"
    assert "fc1_activation_mean" in file.read_text()
    assert values(tmp_path) == {(0, "fc1", "activation", "mean"): 2.5}


@pytest.mark.parametrize("given", ["statistics_logger", "tb_writer"])
def test_no_file_beside_a_logger(given, tmp_path):
    """The default file is for those who pass neither logger nor writer."""
    debug_api.initialize(config(), log_dir=tmp_path, **{given: Logger() if given != "tb_writer" else Writer()})
    debug_api.log_tensor_stats("fc1", tensor=torch.ones(2), tensor_name="activation")
    debug_api.end_debug()
    assert not (tmp_path / "nvdlfw_inspect_statistics_logs").exists()


def test_a_failing_logger_of_the_users_is_heard(tmp_path):
    """What a user's logger raises reaches the caller of step, and the next step is the next one."""

    class Fails(BaseLogger):
        def log_scalar(self, name, value, iteration, **kwargs):
            raise KeyError("mine")

    debug_api.initialize(config(stats=["max"]), statistics_logger=Fails(), log_dir=tmp_path)
    for _ in range(2):
        debug_api.log_tensor_stats("fc1", tensor=torch.ones(2), tensor_name="activation")
        with pytest.raises(KeyError, match="mine"):
            debug_api.step()
    assert [key[0] for key in values(tmp_path)] == [0, 1]


def test_nan_is_counted_and_said_once(tmp_path, capsys):
    """NaN and Inf are left out of the other statistics, which say so."""
    debug_api.initialize(config(stats=["mean", "nans", "infs"]), log_dir=tmp_path)
    for _ in range(3):
        x = torch.tensor([1.0, 3.0, float("nan"), float("inf")])
        debug_api.log_tensor_stats("fc1", tensor=x, tensor_name="activation")
        debug_api.step()
    assert capsys.readouterr().err.count("1 NaN and 1 Inf") == 1
    first = lines(tmp_path)[0]
    assert (first["value"], first["nans"], first["infs"]) == (2.0, 1, 1)


def test_the_graph_is_not_kept(tmp_path):
    """A measured tensor is freed with its graph, and its gradient is what it would have been."""
    debug_api.initialize(config(), log_dir=tmp_path)
    x = torch.randn(5, requires_grad=True)
    y = (x * 2).relu()
    held = weakref.ref(y)
    result = debug_api.log_tensor_stats("fc1", tensor=y, tensor_name="activation")
    y.sum().backward()
    assert torch.equal(x.grad, (x > 0).float() * 2)
    del y
    gc.collect()
    assert held() is None
    assert not result["mean"].requires_grad


def test_later_changes_do_not_count(tmp_path):
    """The value is that of the moment of the call, even if it is looked at later."""
    debug_api.initialize(config(stats=["max"]), log_dir=tmp_path)
    x = torch.ones(5)
    result = debug_api.log_tensor_stats("fc1", tensor=x, tensor_name="activation")
    x.mul_(100)
    debug_api.step()
    assert result["max"].item() == 1.0
    assert values(tmp_path) == {(0, "fc1", "activation", "max"): 1.0}


def test_threads(tmp_path):
    """Calls of several threads at once lose nothing, even while steps end."""
    debug_api.initialize(config(stats=["numel", "l1_norm"]), log_dir=tmp_path)
    failures = []

    def work(layer):
        try:
            for _ in range(300):
                debug_api.log_tensor_stats(layer, tensor=torch.ones(2), tensor_name="activation")
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(f"layer{i % 2}",)) for i in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        debug_api.step()
    debug_api.end_debug()
    assert not failures
    for layer in ("layer0", "layer1"):
        for name in ("numel", "l1_norm"):
            logged = [e["value"] for e in lines(tmp_path) if e["layer"] == layer and e["statistic"] == name]
            assert sum(logged) == 2 * 300 * 2


# Features


FEATURE = """
import pipesight.stats as debug_api
from pipesight.stats.builtin_features import LogTensorStats

@debug_api.register_feature()
class Mine:
    @debug_api.api_method
    def log_tensor_stats(self, config, layer_name, tensor, tensor_name):
        return {"mine": config["factor"] * tensor.numel()}

    @debug_api.api_method
    def count_calls(self, config, layer_name, **kwargs):
        return (layer_name, config["factor"], kwargs)

@debug_api.register_feature()
class LogHalf(LogTensorStats):
    @debug_api.api_method
    def log_tensor_stats(self, config, layer_name, *, tensor, **kwargs):
        return super().log_tensor_stats(config, layer_name, tensor=tensor / 2, **kwargs)

@debug_api.register_feature()
class Fails:
    @debug_api.api_method
    def log_tensor_stats(self, config, layer_name, **kwargs):
        raise {"AttributeError": AttributeError, "KeyError": KeyError}[config["what"]]("of mine")
"""


@pytest.fixture
def features(tmp_path):
    (tmp_path / "features").mkdir()
    (tmp_path / "features" / "mine.py").write_text(FEATURE)
    return tmp_path / "features"


def with_feature(name, **feature):
    chosen = config(stats=["max"])
    chosen["s"][name] = {"enabled": True, **feature}
    return chosen


def test_two_features_serve_one_call(features, tmp_path):
    """A feature of the user's and a built-in one both serve a call; results come together."""
    debug_api.initialize(with_feature("Mine", factor=3), features, log_dir=tmp_path)
    result = debug_api.log_tensor_stats("fc1", tensor=torch.ones(5), tensor_name="activation")
    assert result == {"mine": 15, "max": torch.tensor(1.0, dtype=torch.float64)}


@pytest.mark.parametrize("error", [AttributeError, KeyError])
def test_errors_of_features_reach_the_caller(error, features, tmp_path):
    """What a feature raises is raised as it is."""
    debug_api.initialize(with_feature("Fails", what=error.__name__), features, log_dir=tmp_path)
    with pytest.raises(error, match="of mine"):
        debug_api.log_tensor_stats("fc1", tensor=torch.ones(5), tensor_name="activation")


def test_a_feature_that_derives_from_ours(features, tmp_path):
    """A derived feature that logs in its own way is asked, and does not count twice beside the built-in one."""
    chosen = config(stats=["numel", "max"])
    chosen["s"]["LogHalf"] = {"enabled": True, "tensors": ["activation"], "stats": ["l1_norm", "kurtosis"]}
    debug_api.initialize(chosen, features, log_dir=tmp_path)
    x = torch.tensor([1.0, 2.0, 3.0, 6.0])
    debug_api.log_tensor_stats("fc1", tensor=x, tensor_name="activation")
    debug_api.end_debug()
    found = values(tmp_path)
    assert found[0, "fc1", "activation", "numel"] == 4
    assert found[0, "fc1", "activation", "l1_norm"] == 6.0
    centred = x.double() - x.double().mean()
    kurtosis = (centred**4).mean() / (centred**2).mean() ** 2
    assert found[0, "fc1", "activation", "kurtosis"] in (
        pytest.approx(kurtosis.item()),
        pytest.approx(kurtosis.item() - 3),
    )


# Processes


SCRIPT = """
import sys
import torch
import pipesight.stats as debug_api
from support.logged import config
debug_api.initialize(config(stats=["max"]), log_dir=sys.argv[1])
for i in range(3):
    debug_api.log_tensor_stats("fc1", tensor=torch.full((2,), float(i)), tensor_name="activation")
    if i < 2:
        debug_api.step()
"""

WATCH = """
import sys
import torch
from torch import nn
import pipesight.stats
from support.logged import config
model = nn.Sequential(nn.Linear(2, 2))
pipesight.stats.watch(model, config(("activation",), ["numel"]), log_dir=sys.argv[1])
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for i in range(3):
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("body", "end", "code"),
    [
        (SCRIPT, "", 0),
        (SCRIPT, "raise ValueError", 1),
        (SCRIPT, "sys.exit(3)", 3),
        (WATCH, "", 0),
        (WATCH, "raise ValueError", 1),
    ],
)
def test_a_session_left_open_saves_everything(body, end, code, tmp_path):
    """At the end of the process, however it ends, what was measured is written."""
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(body) + end + "\n")
    done = warm.run(script, tmp_path)
    assert done.returncode == code, done.stderr
    assert ("Traceback" in done.stderr) == (code == 1)
    expected = [0.0, 1.0, 2.0] if body is SCRIPT else [2.0, 2.0, 2.0]
    assert list(values(tmp_path).values()) == expected


def test_a_forked_child_leaves_the_session_to_its_parent(tmp_path):
    """A child that ends does not write what its parent is still going to write."""
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(SCRIPT).replace("for i", "import os, warnings\nfor i")
        + "child = os.fork()\nif not child:\n    sys.exit(0)\nassert os.waitpid(child, 0)[1] == 0\n"
    )
    done = warm.run(script, tmp_path)
    assert done.returncode == 0, done.stderr
    assert list(values(tmp_path).values()) == [0.0, 1.0, 2.0]


@pytest.mark.slow
def test_memory_stays_the_same(tmp_path):
    """Ten thousand steps leave nothing behind in memory."""
    logger = Logger()
    logger.log_scalar = lambda *_, **__: None
    debug_api.initialize(config(stats=["max"]), log_dir=tmp_path, statistics_logger=logger)
    x = torch.ones(4)

    def steps(count):
        for i in range(count):
            debug_api.log_tensor_stats("fc1", tensor=x, tensor_name="activation")
            debug_api.log_tensor_stats(f"layer{i % 10}", tensor=x, tensor_name="other")
            debug_api.step()
        gc.collect()
        return len(gc.get_objects())

    before = steps(100)
    assert steps(10_000) - before < 200


def test_messages(tmp_path):
    """log_message writes its line each time it is called."""
    debug_api.initialize(log_dir=tmp_path)
    for _ in range(3):
        debug_api.log_message("hello", level=logging.INFO)
    debug_api.end_debug()
    log = (tmp_path / "nvdlfw_inspect_logs" / "nvdlfw_inspect_globalrank-0.log").read_text()
    assert log.count("hello") == 3


def test_names_of_layers():
    """infer_and_assign_layer_names gives a model and its layers the names that the peer gives."""
    model = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Sequential(torch.nn.ReLU()))
    debug_api.infer_and_assign_layer_names([model])
    names = (model.name, model[0].name, model[1].name, model[1][0].name)
    assert names == ("model", "model.0", "model.1", "model.1.0")


def test_old_values_are_gone(tmp_path):
    """Files of an earlier run are emptied when a session begins, not when its first value comes."""
    for _ in range(2):
        debug_api.initialize(config(stats=["max"]), log_dir=tmp_path)
        logs = [*tmp_path.glob("*statistics_logs/*.log"), *tmp_path.glob("stats/*.jsonl")]
        assert [path.read_text() for path in logs] == ["", ""]
        debug_api.log_tensor_stats("x", tensor=torch.ones(1), tensor_name="activation")
        debug_api.end_debug()
        assert all(path.read_text() for path in logs)


def test_features_are_listed_and_explained():
    """list_features and explain_features need no session."""
    assert "base.LogTensorStats" in debug_api.list_features()
    assert "freq" in debug_api.explain_features("LogTensorStats")
    assert debug_api.explain_features() == debug_api.explain_features("all")


def test_two_sessions_at_once(tmp_path):
    """A session of one's own is apart from the one of initialize()."""
    debug_api.initialize(config(stats=["max"]), log_dir=tmp_path / "a")
    other = open_session(config(stats=["min"]), log_dir=tmp_path / "b")
    debug_api.log_tensor_stats("x", tensor=torch.ones(1), tensor_name="activation")
    other.log_tensor_stats("y", torch.ones(1), "activation")
    other.close()
    other.close()
    assert other.log_tensor_stats("y", torch.ones(1), "activation") == {}
    debug_api.end_debug()
    assert list(values(tmp_path / "a")) == [(0, "x", "activation", "max")]
    assert list(values(tmp_path / "b")) == [(0, "y", "activation", "min")]


@pytest.mark.parametrize(
    ("name", "meant"), [("logdir", "log_dir"), ("config", "config_file"), ("reduction_timeouts", "reduction_timeout")]
)
def test_misspelt_arguments(name, meant):
    """An argument that initialize has not is a TypeError with the nearest that it has."""
    with pytest.raises(TypeError, match=rf"initialize\(\) takes no argument '{name}'; did you mean '{meant}'\?"):
        debug_api.initialize(**{name: "x"})
