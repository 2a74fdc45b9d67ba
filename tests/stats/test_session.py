"""A session: what is kept until a step ends, and how it is merged."""

import copy
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import pipesight.stats as debug_api
from pipesight.stats import BaseLogger, watch
from pipesight.stats import stats_session as session_module
from pipesight.stats.api import open_session
from pipesight.stats.measuring_feature import MeasuringFeature
from pipesight.stats.moments.cpu_moments import measure
from support.logged import assert_six, config, lines, values


@pytest.fixture
def opened(tmp_path):
    """Open sessions of their own; close them at the end."""
    sessions = []

    def open_one(chosen=None, **kwargs):
        sessions.append(open_session(chosen or config(stats=["numel"]), log_dir=tmp_path, **kwargs))
        return sessions[-1]

    yield open_one
    for session in sessions:
        session.close()


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("log"), st.sampled_from("abc"), st.integers(0, 3)),
        st.tuples(st.just("log_at"), st.sampled_from("abc"), st.integers(0, 3), st.integers(0, 4)),
        st.tuples(st.just("step")),
        st.tuples(st.just("flush")),
    ),
    max_size=25,
)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(events=EVENTS)
def test_any_order_of_calls(tmp_path_factory, events):
    """Calls, passed iterations and steps in any order: nothing is lost, doubled or put to another iteration."""
    folder = tmp_path_factory.mktemp("run")
    session = open_session(config(stats=["numel"]), log_dir=folder)
    expected, counter = {}, 0
    for kind, *details in events:
        if kind == "step":
            session.step()
            counter += 1
        elif kind == "flush":
            session.flush()
        else:
            layer, size, iteration = (*details, counter)[:3]
            passed = iteration if kind == "log_at" else None
            session.log_tensor_stats(layer, torch.ones(size), "activation", passed)
            expected[layer, iteration] = expected.get((layer, iteration), 0) + size
    session.close()
    found = {}
    for line in lines(folder):
        key = (line["layer"], line["iteration"])
        found[key] = found.get(key, 0) + line["value"]
    assert found == expected


def test_a_tensor_is_read_once_for_all_features(opened, monkeypatch):
    """Several features that want statistics of one tensor share one reading of it."""
    import pipesight.stats.moments.quantity as quantity

    calls = []
    monkeypatch.setattr(quantity, "measure", lambda t, **kwargs: calls.append(kwargs) or measure(t, **kwargs))
    chosen = config(stats=["mean", "kurtosis"])
    feature = {"enabled": True, "tensors": ["activation"], "stats": ["mean", "cur_amax", "dynamic_range"]}
    chosen["s"]["transformer_engine"] = {"LogTensorStats": feature}
    result = opened(chosen).log_tensor_stats("fc1", torch.tensor([1.0, -2.0, 4.0]), "activation")
    assert list(result) == ["mean", "kurtosis", "cur_amax", "dynamic_range"]
    assert calls == [{"powers": True, "smallest": True, "magnitudes": False}]
    assert result["dynamic_range"].item() == 2.0


def test_features_with_rules_of_their_own(tmp_path):
    """Each feature keeps to its own steps; where both are due, both are logged."""
    chosen = config(stats=["mean"], freq=2)
    feature = {"enabled": True, "tensors": ["activation"], "stats": ["cur_amax"], "freq": 3}
    chosen["s"]["transformer_engine"] = {"LogTensorStats": feature}
    session = open_session(chosen, log_dir=tmp_path)
    for _ in range(7):
        session.log_tensor_stats("fc1", torch.ones(2), "activation")
        session.step()
    session.close()
    assert {name: [k[0] for k in values(tmp_path) if k[3] == name] for name in ("mean", "cur_amax")} == {
        "mean": [0, 2, 4, 6],
        "cur_amax": [0, 3, 6],
    }


def test_products(tmp_path):
    """A call that names a GEMM is logged under its name, if the configuration names it."""
    chosen = config()
    chosen["s"]["LogTensorStats"] = {
        "enabled": True,
        "gemms_struct": [{"gemm": "fprop", "tensors": ["activation"], "stats": ["max"]}],
    }
    session = open_session(chosen, log_dir=tmp_path)
    session.log_tensor_stats("fc1", torch.ones(2), "activation", gemm="fprop")
    assert session.log_tensor_stats("fc1", torch.ones(2), "activation", gemm="dgrad") == {}
    assert session.log_tensor_stats("fc1", torch.ones(2), "activation") == {}
    session.close()
    assert values(tmp_path) == {(0, "fc1", "fprop_activation", "max"): 1.0}


def test_settings_of_a_feature(opened, tmp_path):
    """collect_by measures by settings, with options and beside the built-in feature, without counting twice."""
    session = opened(config(stats=["numel", "l1_norm"]))
    x = torch.logspace(-3, 3, 64)
    ranged = {"max_blockwise_dynamic_range": {"block_size": 4, "dims": 1}}
    for _ in range(2):
        session.log_tensor_stats("fc1", x, "activation")
        result = session.collect_by(
            MeasuringFeature(),
            {"stats": ["kurtosis", ranged]},
            "fc1",
            tensor=x,
            tensor_name="activation",
            layer="ignored",
        )
    assert list(result) == ["kurtosis", "max_blockwise_dynamic_range_block_size_4_dims_1"]
    session.close()
    found = values(tmp_path)
    assert found[0, "fc1", "activation", "numel"] == 128
    assert found[0, "fc1", "activation", "kurtosis"] == pytest.approx(result["kurtosis"].item())


def test_a_logger_may_log(tmp_path):
    """A user's logger that logs a statistic itself does not block."""

    class Logs(BaseLogger):
        def log_scalar(self, name, value, iteration, **kwargs):
            if "again" not in name:
                session.log_tensor_stats("again", torch.tensor([value]), "activation")

    session = open_session(config(stats=["max"]), statistics_logger=Logs(), log_dir=tmp_path)
    done = threading.Event()

    def steps():
        for _ in range(3):
            session.log_tensor_stats("fc1", torch.ones(1), "activation")
            session.step()
        session.close()
        done.set()

    threading.Thread(target=steps, daemon=True).start()
    assert done.wait(20)
    assert sum(line["layer"] == "again" for line in lines(tmp_path)) == 3


def test_counting_goes_on_after_a_failure(opened):
    """A step that fails is over all the same."""
    session = opened()

    def fail():
        raise KeyError

    session.before_step.append(fail)
    for _ in range(2):
        with pytest.raises(KeyError):
            session.step()
    assert session.step_count == 2


def test_a_closed_session(opened, tmp_path):
    """A closed session measures, counts and writes nothing."""
    session = opened()
    session.close()
    session.close()
    session.step()
    session.flush()
    assert session.log_tensor_stats("fc1", torch.ones(1), "activation") == {}
    assert session.closed
    assert session.step_count == 0
    assert not lines(tmp_path)


def test_names_that_never_come_back(opened, monkeypatch):
    """Layer names that are made up anew are not remembered for ever."""
    monkeypatch.setattr(session_module, "MOST_TENSORS", 50)
    session = opened(config(layers="fc1"))
    for i in range(500):
        session.log_tensor_stats(f"layer{i}", torch.ones(1), "activation")
    assert len(session._actions_of) <= 50


@pytest.mark.parametrize("kind", ["inference", "meta default", "double default", "autocast", "deterministic"])
def test_whatever_mode_torch_is_in(kind, tmp_path):
    """Modes and defaults of torch change no value."""
    session = open_session(config(), log_dir=tmp_path)
    x = torch.randn(50)
    with torch.inference_mode(kind == "inference"):
        y = x * 1
        if kind == "meta default":
            with torch.device("meta"):
                result = session.log_tensor_stats("fc1", y, "activation")
                mean = result["mean"]
        elif kind == "autocast":
            with torch.autocast("cpu", torch.bfloat16):
                mean = session.log_tensor_stats("fc1", y, "activation")["mean"]
        else:
            if kind == "double default":
                torch.set_default_dtype(torch.float64)
            try:
                if kind == "deterministic":
                    torch.use_deterministic_algorithms(True)
                mean = session.log_tensor_stats("fc1", y, "activation")["mean"]
            finally:
                torch.set_default_dtype(torch.float32)
                torch.use_deterministic_algorithms(False)
        session.step()
    session.close()
    assert mean.item() == pytest.approx(x.double().mean().item(), rel=1e-6)
    assert_six(values(tmp_path), 0, "fc1", "activation", x)


@pytest.mark.parametrize("tensor", [3.0, None, [1.0]])
def test_what_is_no_tensor(tensor, opened):
    """Anything else than a tensor is a clear error, on steps that are on."""
    with pytest.raises(TypeError, match="tensor"):
        opened().log_tensor_stats("fc1", tensor, "activation")


def test_inside_of_a_transform(opened):
    """Inside of torch.func there is nothing to measure: a clear error."""
    session = opened()

    def logs(x):
        session.log_tensor_stats("fc1", torch.ones(3), "activation")
        return x.sum()

    with pytest.raises(TypeError, match=r"torch\.func"):
        torch.func.grad(logs)(torch.ones(2))


def test_results_are_mappings(opened):
    """What a call returns compares, copies and prints as a mapping."""
    result = opened(config(stats=["max", "min"])).log_tensor_stats("fc1", torch.tensor([1.0, 2.0]), "activation")
    assert {name: value.item() for name, value in result.items()} == {"max": 2.0, "min": 1.0}
    assert repr(result) == "{'max': 2.0, 'min': 1.0}"
    assert len(result) == 2
    assert dict(copy.copy(result)) == dict(result)


def test_the_whole_api_is_one_session(tmp_path):
    """The functions of the module act on the session of initialize()."""
    debug_api.initialize(config(stats=["numel"]), log_dir=tmp_path)
    try:
        from pipesight.stats.api import running

        assert running().step_count == 0
        debug_api.step()
        assert running().step_count == 1
    finally:
        debug_api.end_debug()


def test_scalars_of_a_feature_in_a_watched_model(tmp_path):
    """What a feature logs by itself goes to the session that calls it."""
    folder = tmp_path / "features"
    folder.mkdir()
    (folder / "own.py").write_text(
        "from pipesight.stats import api_method, log_scalar, register_feature\n"
        "@register_feature()\n"
        "class Own:\n"
        "    @api_method\n"
        "    def log_tensor_stats(self, config, layer_name, tensor, tensor_name, iteration, **kwargs):\n"
        "        log_scalar('own', tensor.sum().item(), iteration)\n"
    )
    section = {"enabled": True, "layers": {"layer_types": "all"}, "Own": {"enabled": True, "tensors": ["input"]}}
    model = torch.nn.Sequential(torch.nn.Identity())
    with watch(model, {"s": section}, feature_dirs=[folder], log_dir=tmp_path):
        model(torch.tensor([3.0, 4.0]))
    assert [line["value"] for line in lines(tmp_path)] == [7.0]
