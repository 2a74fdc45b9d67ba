"""The shim gives pipesight the import names of DFTracer, and its `dftracer` handles a trace as DFTracer's does."""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import time
from pathlib import Path

import dftracer
import pytest
from dftracer.logger import dft_fn
from dftracer.logger import dftracer as tracer

import pipesight.trace
import pipesight.trace.dftracer
from pipesight.trace import ai
from pipesight.trace.ai import CONVENTIONS
from support.dftraced import clean_environment, events_of, files, own, read, run_script, user
from support.traced import tree_put_back

OURS = pipesight.trace.dftracer
ENV = {
    "DFTRACER_ENABLE": OURS.DFTRACER_ENABLE,
    "DFTRACER_ENABLE_ENV": "DFTRACER_ENABLE",
    "DFTRACER_INIT_ENV": "DFTRACER_INIT",
    "DFTRACER_INIT_PRELOAD": False,
    "DFTRACER_LOG_LEVEL": OURS.DFTRACER_LOG_LEVEL,
    "DFTRACER_LOG_LEVEL_ENV": "DFTRACER_LOG_LEVEL",
}
LOGGER = {**ENV, "dft_fn": OURS.dft_fn, "dftracer": OURS.dftracer}
EVENTS = {
    "ComputeEvent": "compute",
    "DataEvent": "data",
    "DataLoaderEvent": "dataloader",
    "CommunicationEvent": "comm",
    "DeviceEvent": "device",
    "CheckpointEvent": "checkpoint",
    "PipelineEvent": "pipeline",
}
CONSTANTS = {
    "BLOCK_NAME": "block",
    "CTX_SEPARATOR": ".",
    "INIT_NAME": "init",
    "ITER_COUNT_NAME": "count",
    "ITER_NAME": "iter",
    "ROOT_CAT": "ai_root",
    "ROOT_NAME": "ai_root",
    "START_METADATA_NAME": "start",
    "STOP_METADATA_NAME": "end",
    **dict.fromkeys([*EVENTS, "IOEvent", "OtherEvent", "ProfileCategory"]),
    **dict.fromkeys(["get_iter_block_name", "get_iter_handle_name"]),
}
CLASSES = {
    "AI": lambda: ai,
    "Checkpoint": lambda: ai.checkpoint,
    "Communication": lambda: ai.comm,
    "Compute": lambda: ai.compute,
    "DFTracerAI": lambda: ai.comm.send,
    "Data": lambda: ai.data,
    "DataLoader": lambda: ai.dataloader,
    "Device": lambda: ai.device,
    "IO": lambda: ai.checkpoint.io,
    "Other": lambda: ai.other,
    "Pipeline": lambda: ai.pipeline,
}
AI = {**CONSTANTS, **dict.fromkeys(CLASSES), "ai": ai, **{name: getattr(ai, name) for name in CONVENTIONS}}
AI["other"] = ai.other
DYNAMO = dict.fromkeys(["Dynamo", "create_backend", "dynamo"])
PROFILER = {"trace_handler": None}
BY_HAND = ["enter_event", "exit_event", "finalize", "get_time", "log_event", "log_metadata_event"]

# Those names of dftracer 1.0.11, dftracer 2.2.0 and pydftracer 2.0.6 that a program uses; None: see the tests below.
NAMES = {
    "dftracer": {"__version__": "2.2.0+pipesight"},
    "dftracer.dftracer": dict.fromkeys([*BY_HAND, "initialize", "set_app_metadata_int", "set_app_metadata_string"]),
    "dftracer.logger": {**LOGGER, "ai": ai},
    "dftracer.dbg": {},
    "dftracer.dbg.logger": {**LOGGER, "ai": ai},
    "dftracer.python": {**AI, **LOGGER, **DYNAMO, "__version__": "2.0.6+pipesight"},
    "dftracer.python.ai": AI,
    "dftracer.python.ai_classes": dict.fromkeys([*CLASSES, "add_category", "add_io"]),
    "dftracer.python.ai_common": {**CONSTANTS, **dict.fromkeys(CLASSES)},
    "dftracer.python.ai_names": CONSTANTS,
    "dftracer.python.common": {"dft_fn": OURS.dft_fn, "dftracer": OURS.dftracer},
    "dftracer.python.dynamo": DYNAMO,
    "dftracer.python.env": ENV,
    "dftracer.python.logger": LOGGER,
    "dftracer.python.torch": PROFILER,
    "dftracer.python.torch.profiler": PROFILER,
    "dftracer.python.dbg": {**AI, **LOGGER, **DYNAMO},
    "dftracer.python.dbg.ai": AI,
    "dftracer.python.dbg.logger": LOGGER,
    "dftracer.python.dbg.torch": PROFILER,
    "dftracer.python.dbg.torch.profiler": PROFILER,
}


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    with clean_environment(monkeypatch):
        yield


@pytest.fixture
def traced(tmp_path):
    """Return a function that traces a call, and gives the events in the order they end."""
    return functools.partial(events_of, folder=tmp_path)


# The names.


@pytest.mark.parametrize("module", NAMES)
def test_names_are_those_of_pipesight(module):
    """Every name that a program imports from DFTracer is there, and is pipesight's own object."""
    found = importlib.import_module(module)
    assert sorted(found.__all__) == sorted(NAMES[module])
    for name, thing in NAMES[module].items():
        assert hasattr(found, name)
        assert thing is None or getattr(found, name) is thing or getattr(found, name) == thing


def test_no_module_is_forgotten():
    """The table of names above covers every module of the shim."""
    root = Path(dftracer.__file__).parents[1]
    paths = root.glob("dftracer/**/*.py")
    assert {".".join(p.relative_to(root).with_suffix("").parts).removesuffix(".__init__") for p in paths} == set(NAMES)


def test_constants_are_the_conventions():
    """The enumerations have the categories and names of the tree, as strings."""
    module = importlib.import_module("dftracer.python")
    assert tuple(module.ProfileCategory) == (*CONVENTIONS, "other")
    for name, category in EVENTS.items():
        members = getattr(module, name)
        assert tuple(members) == CONVENTIONS[category]
        assert [member.name for member in members] == [value.upper() for value in CONVENTIONS[category]]


def test_classes_know_their_nodes():
    """Each class is that of its node, recording or not, and of no category else; called, it makes a tree apart."""
    module = importlib.import_module("dftracer.python")
    nodes = {name: node() for name, node in CLASSES.items()}
    for name in CLASSES:
        kind = getattr(module, name)
        expected = set(CLASSES) if name == "DFTracerAI" else {name}
        assert {other for other, node in nodes.items() if isinstance(node, kind)} == expected
    assert not isinstance(ai.compute.forward, module.Compute)
    assert isinstance(ai.init(enable=True, epoch=2), module.DFTracerAI)
    apart = module.AI(step=3, enable=False)
    assert {(n.category, n.name) for n in apart.subtree()} >= {("comm", "send"), ("data", "data.io.open")}
    assert not any(node.enabled or node in set(ai.subtree()) for node in apart.subtree())
    assert apart.compute.forward.args == {"step": 3}
    assert [module.DFTracerAI(cat="mine", name=name).name for name in ("", "read")] == ["mine", "read"]
    assert module.IO(cat="mine", parent_name="disk").read.name == "disk.io.read"


def test_tree_of_a_program(traced):
    """Classes derived from DFTracer's are nodes with children; what is done to one reaches all below it."""
    module = importlib.import_module("dftracer.python")

    class Step(module.DFTracerAI):
        def __init__(self, step):
            super().__init__(cat="step", step=step)
            self.create_children({"plan": "planned", "act": "acted"})

    class Agent(module.DFTracerAI):
        def __init__(self):
            super().__init__(cat="agent_root", name="agent")
            self.step, self.compute = Step(3), OwnCompute(enable=True)
            self._children = {"step": self.step, "compute": self.compute}

    class OwnCompute(module.Compute):
        pass

    def work():
        agent = Agent()
        with agent as opened, agent.step.plan:
            assert opened is agent
        agent.update(args={"run": 7})
        agent.step.act(lambda: None)()
        list(agent.compute.forward.iter([1], include_iter=False))
        agent.disable()
        with agent, agent.step, agent.step.plan, agent.compute.forward:
            pass
        agent.enable()
        agent.step.derive("end").start()
        agent.step.derive("end").stop()
        assert all(isinstance(node, module.DFTracerAI) for node in (agent, agent.compute, agent.step.plan))
        assert isinstance(agent.compute, module.Compute)
        assert not isinstance(agent.compute, Agent | module.Data)
        assert not isinstance(ai.compute, OwnCompute)

    found = [
        (event["cat"], event["name"], event["args"].get("step"), event["args"].get("run")) for event in traced(work)
    ]
    assert sorted(found) == [
        ("agent_root", "agent", None, None),
        ("compute", "forward.block", None, 7),
        ("step", "acted", 3, 7),
        ("step", "planned", 3, None),
        ("step", "step.end", 3, 7),
    ]


def test_class_that_makes_no_node():
    """A derived class that does not initialize what it derives from is told so."""
    module = importlib.import_module("dftracer.python")

    class Lazy(module.DFTracerAI):
        def __init__(self):
            pass

    with pytest.raises(AttributeError, match=r"Lazy.__init__ must call super\(\).__init__\(cat=...\)"):
        Lazy().start()


def test_events_beyond_the_guide(traced):
    """Events of I/O and of other work have the names of DFTracer 2.2; waits and bodies of loops can be named."""

    compute = importlib.import_module("dftracer.python").Compute()

    def work():
        for node in (ai.data.io.open, ai.checkpoint.io.write, ai.other.io.close, ai.other.log):
            with node:
                pass
        for _ in compute.iter([1], iter_name="waiting", block_name="working"):
            pass

    found = [(event["cat"], event["name"]) for event in traced(work)]
    assert found[:2] == [("data", "data.io.open"), ("checkpoint", "checkpoint.io.write")]
    assert found[2:4] == [("other", "other.io.close"), ("other", "other.log")]
    assert found[4:] == [("compute", "waiting"), ("compute", "working")]
    assert (ai.compute.cat, ai.data.io.cat) == ("compute", "data")


def test_lines_are_those_of_dftracer(tmp_path, monkeypatch):
    """The file has the lines of DFTracer 2.0 and no more: one per event and nine around; labels for viewers on demand.

    A trace without events has those nine.
    """
    monkeypatch.setenv("DFTRACER_TRACE_COMPRESSION", "0")
    for events, labels, expected in ((0, None, 9), (3, None, 12), (3, "1", 15)):
        if labels:
            monkeypatch.setenv("DFTRACER_TRACK_LABELS", labels)
        log = tracer.initialize_log(tmp_path / f"run{expected}.pfw")
        for _ in range(events):
            with ai.compute.step:
                pass
        log.finalize()
        assert len((tmp_path / f"run{expected}.pfw").read_text().splitlines()) == expected


def test_empty_trace_of_a_program_that_just_ends(tmp_path):
    """Without finalize, a trace without events leaves its file too; a forked process that does nothing leaves none."""
    source = """
        import os
        from dftracer.logger import dftracer
        dftracer.initialize_log("run.pfw", None, -1)
        if os.fork() == 0:
            raise SystemExit
        os.wait()
    """
    run_script(source, tmp_path)
    assert files(tmp_path) == ["run.pfw.gz"]
    assert user(read(tmp_path / "run.pfw.gz")) == []


OPERATIONS = """
    import torch
    from dftracer.python import ai, dftracer, dynamo
    from dftracer.python.dynamo import create_backend
    from dftracer.python.torch import trace_handler

    log = dftracer.initialize_log("run.pfw", None, -1)

    @dynamo.compile(autograd=False)
    def plain(x):
        return torch.relu(x).sum()

    model = torch.nn.Linear(2, 2)
    traced = torch.compile(model, backend=create_backend("model", epoch=1))
    with ai.compute.forward:
        plain(torch.ones(3))
    traced(torch.ones(1, 2)).sum().backward()
    with ai.compute.step, torch.profiler.profile(on_trace_ready=trace_handler) as profiler:
        torch.ones(3).exp()
    log.finalize()
"""


def test_operations_of_graphs_and_of_the_profiler(tmp_path):
    """Operations that torch.compile captures, forward and backward, and those the profiler has seen, are events.

    They lie inside the span that was open around them.
    """
    run_script(OPERATIONS, tmp_path)
    found = user(read(tmp_path / "run.pfw.gz"))
    named = {event["name"]: event for event in found}
    operations = [event for event in found if event["cat"] == "dynamo"]
    assert [event["name"] for event in operations[:2]] == ["function.relu", "method.sum"]
    assert {event["args"]["p_idx"] for event in operations[:2]} == {named["forward"]["id"]}
    assert {own(event).get("epoch") for event in operations[2:]} == {1}
    assert any("addmm" in event["name"] for event in operations)
    assert any("mm" in event["name"] and "addmm" not in event["name"] for event in operations)  # of the backward
    exp, step = named["aten::exp"], named["step"]
    assert exp["cat"] == "PP"
    assert step["ts"] - 1000 <= exp["ts"] <= exp["ts"] + exp["dur"] <= step["ts"] + step["dur"] + 1000  # microseconds


def test_module_in_c(tmp_path):
    """``dftracer.dftracer`` begins the one trace, and logs to it."""
    native = importlib.import_module("dftracer.dftracer")
    native.initialize(log_file=tmp_path / "run.pfw", data_dirs=None, process_id=-1)
    native.enter_event()
    native.log_event(name="read", cat="io", start_time=native.get_time(), duration=5, int_args={"size": (1, 7)})
    native.exit_event()
    native.finalize()
    (event,) = user(read(tmp_path / "run.pfw.gz"))
    assert (event["name"], event["dur"], own(event)) == ("read", 5, {"size": 7})


def test_signatures_are_those_of_dftracer():
    """Arguments have the names, the order and the defaults of DFTracer's."""
    event = {"cat": inspect.Parameter.empty, "name": None, "epoch": None, "step": None, "image_idx": None}
    shape = lambda function: {name: p.default for name, p in inspect.signature(function).parameters.items()}
    assert list(shape(dft_fn).items()) == [*event.items(), ("image_size", None), ("enable", True)]
    assert list(shape(tracer.initialize_log).items()) == [("logfile", None), ("data_dir", None), ("process_id", -1)]
    iter_ = [("name", "loop"), ("iter_name", "step"), ("include_yield", True), ("include_iter", True)]
    assert list(shape(dft_fn.iter).items())[2:] == iter_
    assert list(shape(dft_fn.update)) == ["self", "epoch", "step", "image_idx", "image_size", "args"]
    logged = ["self", "name", "cat", "start_time", "duration", "int_args", "float_args", "string_args"]
    assert list(shape(tracer.log_event)) == logged


def test_package_is_typed():
    """The package is typed."""
    assert (Path(dftracer.__file__).parent / "py.typed").is_file()


def test_import_is_light(tmp_path):
    """Importing takes no torch, works outside of the main thread, and touches neither signals nor loggers."""
    source = """
        import logging, signal, sys, threading
        before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
        def load():
            import dftracer.logger, dftracer.python
            done.append(True)
        done = []
        thread = threading.Thread(target=load)
        thread.start()
        thread.join()
        assert done
        assert "torch" not in sys.modules
        assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
        for name in (None, "pipesight", "DFTRACER", "dftracer_dbg"):
            assert not logging.getLogger(name).handlers, name
        import threading as t
        assert t.active_count() == 1
    """
    assert run_script(source, tmp_path) == ""
    assert files(tmp_path) == []


# Beginning and ending.


def test_one_instance(tmp_path):
    """There is one dftracer, whoever asks for it."""
    assert tracer.get_instance() is tracer.get_instance() is tracer.initialize_log(str(tmp_path / "unused.pfw"))
    tracer.get_instance().finalize()


def test_one_event_makes_a_file(traced):
    """A trace of a single event is a file; DFTracer deletes it below three."""
    (event,) = traced(lambda: dft_fn("io", name="read").__enter__().__exit__())
    assert (event["cat"], event["name"]) == ("io", "read")
    assert event["args"]["level"] == 2
    assert event["args"]["p_idx"] == 6


@pytest.mark.parametrize("logfile", [None, ...])
def test_file_of_the_environment(logfile, tmp_path, monkeypatch):
    """Without a logfile, that of DFTRACER_LOG_FILE is written."""
    monkeypatch.setenv("DFTRACER_LOG_FILE", str(tmp_path / "deep" / "env.pfw"))
    log = tracer.initialize_log(logfile)
    with dft_fn("a"):
        pass
    log.finalize()
    assert len(user(read(tmp_path / "deep" / "env.pfw.gz"))) == 1


def test_argument_wins_over_the_environment(tmp_path):
    """A logfile that the program names is used, even if the environment began another trace at the import."""
    source = """
        from dftracer.logger import dft_fn, dftracer
        log = dftracer.initialize_log("asked.pfw", "data", -1)
        with dft_fn("a"): pass
        log.finalize()
        with dft_fn("b"): pass
    """
    assert run_script(source, tmp_path, DFTRACER_ENABLE="1", DFTRACER_LOG_FILE="env.pfw") == ""
    assert files(tmp_path) == ["asked.pfw.gz"]
    assert [event["cat"] for event in user(read(tmp_path / "asked.pfw.gz"))] == ["a"]


def test_trace_of_the_environment_is_taken_over(tmp_path):
    """Without a logfile, initialize_log goes on with the trace that the environment began; finalize ends it."""
    source = """
        from dftracer.python import dft_fn, dftracer
        with dft_fn("a"): pass
        log = dftracer.initialize_log()
        with dft_fn("b"): pass
        log.finalize()
        with dft_fn("c"): pass
    """
    assert run_script(source, tmp_path, DFTRACER_ENABLE="1", DFTRACER_LOG_FILE="env.pfw") == ""
    assert files(tmp_path) == ["env.pfw.gz"]
    assert [event["cat"] for event in user(read(tmp_path / "env.pfw.gz"))] == ["a", "b"]


def test_default_file(tmp_path, monkeypatch):
    """Where nobody names a file, it is trace.pfw.gz in the current folder."""
    monkeypatch.chdir(tmp_path)
    log = tracer.initialize_log()
    with dft_fn("a"):
        pass
    log.finalize()
    assert files(tmp_path) == ["trace.pfw.gz"]


@pytest.mark.parametrize(("value", "written"), [("0", False), ("1", True), (None, False)])
def test_enable(value, written, tmp_path, monkeypatch):
    """DFTRACER_ENABLE=1 is on; 0 and unset are off, as with DFTracer."""
    monkeypatch.delenv("DFTRACER_ENABLE")
    if value is not None:
        monkeypatch.setenv("DFTRACER_ENABLE", value)
    log = tracer.initialize_log(tmp_path / "run.pfw")
    with dft_fn("a") as event:
        event.update(step=1).flush()
    assert list(dft_fn("a").iter([1, 2])) == [1, 2]
    log.log_event("a", "b", log.get_time(), 1)
    log.log_metadata_event("a", "b")
    log.finalize()
    assert files(tmp_path) == (["run.pfw.gz"] if written else [])


@pytest.mark.parametrize(("value", "args"), [("0", {}), ("1", {"epoch": 1}), (None, {"epoch": 1})])
def test_inc_metadata(value, args, traced, monkeypatch):
    """DFTRACER_INC_METADATA=0 leaves arguments out; unset, they are written."""
    if value is not None:
        monkeypatch.setenv("DFTRACER_INC_METADATA", value)
    (event,) = traced(lambda: dft_fn("a", epoch=1).log(lambda: None)())
    assert own(event) == args


def test_compression(tmp_path, monkeypatch):
    """DFTRACER_TRACE_COMPRESSION=0 writes plain text."""
    monkeypatch.setenv("DFTRACER_TRACE_COMPRESSION", "0")
    log = tracer.initialize_log(tmp_path / "run.pfw")
    with dft_fn("a"):
        pass
    log.finalize()
    assert files(tmp_path) == ["run.pfw"]
    assert len(user(read(tmp_path / "run.pfw"))) == 1


@pytest.mark.parametrize(("value", "level"), [("DEBUG", 10), ("INFO", 20), ("WARN", 30), ("error", 40)])
def test_log_level(value, level, tmp_path, monkeypatch):
    """DFTRACER_LOG_LEVEL is the level of pipesight's logger for traces, which keeps its name."""
    monkeypatch.setenv("DFTRACER_LOG_LEVEL", value)
    tracer.initialize_log(tmp_path / "run.pfw").finalize()
    assert logging.getLogger("pipesight.trace").level == level


def test_bad_log_level(tmp_path, monkeypatch, caplog):
    """A level that is none is said, and ignored."""
    monkeypatch.setenv("DFTRACER_LOG_LEVEL", "LOUD")
    tracer.initialize_log(tmp_path / "run.pfw").finalize()
    assert "'LOUD'; ignored" in caplog.text
    assert logging.getLogger("pipesight.trace").level == logging.NOTSET


def test_initialize_again_after_finalize(tmp_path):
    """A second initialize_log after finalize writes again; a second finalize does no harm."""
    for name in ("one", "two"):
        log = tracer.initialize_log(tmp_path / f"{name}.pfw", None, -1)
        with dft_fn(name):
            pass
        log.finalize()
        log.finalize()
    for name in ("one", "two"):
        assert [event["cat"] for event in user(read(tmp_path / f"{name}.pfw.gz"))] == [name]


def test_initialize_twice(tmp_path, caplog):
    """Without finalize, a second initialize_log goes on with the first file, and says so if it names another."""
    log = tracer.initialize_log(tmp_path / "one.pfw")
    with dft_fn("a"):
        pass
    tracer.initialize_log(tmp_path / "one.pfw")
    tracer.initialize_log()
    assert caplog.text == ""
    tracer.initialize_log(tmp_path / "two.pfw")
    assert f"ignoring {tmp_path / 'two.pfw'}" in caplog.text
    with dft_fn("b"):
        pass
    log.finalize()
    assert files(tmp_path) == ["one.pfw.gz"]
    assert [event["cat"] for event in user(read(tmp_path / "one.pfw.gz"))] == ["a", "b"]


def test_trace_begun_by_pipesight(tmp_path):
    """A trace that pipesight.trace.start began outlives initialize_log and finalize."""
    with pipesight.trace.start(tmp_path / "ours.pfw"):
        log = tracer.initialize_log()
        with dft_fn("a"):
            pass
        log.finalize()
        with dft_fn("b"):
            pass
    assert [event["cat"] for event in user(read(tmp_path / "ours.pfw.gz"))] == ["a", "b"]


def test_process_id_is_in_the_name(tmp_path):
    """Processes that share a logfile and pass their number write files of their own."""
    log = tracer.initialize_log(str(tmp_path / "run.pfw"), "/data", process_id=3)
    with dft_fn("a"):
        pass
    log.finalize()
    assert files(tmp_path) == ["run-3.pfw.gz"]


def test_end_without_finalize(tmp_path):
    """A program that forgets finalize leaves a whole file."""
    source = """
        from dftracer.logger import dft_fn, dftracer
        dftracer.initialize_log("run.pfw", None, -1)
        with dft_fn("a"): pass
    """
    run_script(source, tmp_path)
    assert len(user(read(tmp_path / "run.pfw.gz"))) == 1


# Events by hand.


def test_training_program(tmp_path, monkeypatch):
    """A program in all styles: functions, blocks, loops and hooks are events, nested as they run."""
    monkeypatch.chdir(tmp_path)

    @ai.compute.forward
    def forward(x):
        return x + 1

    @ai.compute
    def compute(x):
        y = forward(x)
        with ai.compute.backward, ai.comm.all_reduce:
            return y

    class Hook:
        def before(self, step):
            ai.update(step=step)
            ai.device.transfer.start()

        def after(self):
            ai.device.transfer.stop()

    @ai.pipeline.train
    def train():
        hook = Hook()
        for epoch in ai.pipeline.epoch.iter(range(2)):
            ai.compute.forward.update(epoch=epoch)
            for step, x in ai.dataloader.fetch.iter(enumerate([1.0])):
                hook.before(step)
                hook.after()
                assert compute(x) == 2

    with tree_put_back():
        log = tracer.initialize_log(...)  # left open, as where nobody names a file
        train()
        log.finalize()
    events = user(read(tmp_path / "trace.pfw.gz"))
    body = ["device/transfer", "compute/forward", "comm/all_reduce", "compute/backward", "compute/compute"]
    epoch = ["pipeline/epoch.iter", "dataloader/fetch.iter", *body, "dataloader/fetch.block", "pipeline/epoch.block"]
    assert [f"{event['cat']}/{event['name']}" for event in events] == [*epoch, *epoch, "pipeline/train"]
    by_id = {event["id"]: event["name"] for event in events}
    assert {event["name"]: by_id.get(event["args"]["p_idx"]) for event in events} == {
        **{"train": None, "epoch.iter": "train", "epoch.block": "train"},
        **{"fetch.iter": "epoch.block", "fetch.block": "epoch.block"},
        **{"transfer": "fetch.block", "compute": "fetch.block"},
        **{"forward": "compute", "backward": "compute", "all_reduce": "backward"},
    }
    assert [own(event) for event in events if event["name"] == "forward"] == [{"step": 0, "epoch": e} for e in (0, 1)]
    assert [own(event)["count"] for event in events if event["name"] == "epoch.block"] == ["1", "2"]


def test_first_event_of_a_process(tmp_path):
    """Ids count from 7: the lower ones are the root and the lines that DFTracer begins a file with."""
    source = """
        from dftracer.logger import ai, dftracer
        log = dftracer.initialize_log("run.pfw")
        with ai.checkpoint.init: pass
        log.finalize()
    """
    run_script(source, tmp_path)
    (event,) = user(read(tmp_path / "run.pfw.gz"))
    assert (event["id"], event["name"], event["cat"]) == (7, "checkpoint.init", "checkpoint")
    assert (event["args"]["p_idx"], event["args"]["level"]) == (6, 2)


def test_log_event(traced):
    """An event has the times that were given, and the arguments, tagged as in DFTracer 2 or not."""
    log = tracer.get_instance()
    start = []

    def work():
        start.append(log.get_time())
        log.log_event("x", "a", start[0] - 50, 40, string_args={"n": "1"})
        log.log_event("y", "a", start[0], 0, {"n": (0, 2)}, {"f": (1, 0.5)}, {"s": (2, "z")})

    first, second = traced(work)
    assert (first["name"], first["cat"], first["ts"], first["dur"]) == ("x", "a", start[0] - 50, 40)
    assert (own(first), own(second)) == ({"n": "1"}, {"n": 2, "f": 0.5, "s": "z"})
    assert abs(start[0] / 1e6 - time.time()) < 60
    assert first["id"] != second["id"]


def test_enter_and_exit(traced):
    """Between enter_event and exit_event, log_event describes what the events in between are nested in."""
    log = tracer.get_instance()

    def work():
        log.enter_event()
        start = log.get_time()
        with dft_fn("a", name="inner"):
            pass
        log.log_event("outer", "a", start, log.get_time() - start)
        log.log_event("more", "a", start, 0)
        log.exit_event()
        log.exit_event()
        log.log_event("after", "a", start, 0)

    found = {event["name"]: event for event in traced(work)}
    outer = found["outer"]
    assert (outer["args"]["level"], outer["args"]["p_idx"]) == (2, 6)
    assert found["inner"]["args"]["p_idx"] == found["more"]["args"]["p_idx"] == outer["id"]
    assert len({event["id"] for event in found.values()}) == 4
    assert found["after"]["args"]["level"] == 2


def test_enter_before_the_trace_begins(traced):
    """An enter_event while nothing was traced has an exit_event of its own."""
    log = tracer.get_instance()
    log.enter_event()
    found = traced(lambda: [log.log_event("x", "a", 0, 0), log.exit_event(), log.log_event("y", "a", 0, 0)])
    assert [(e["args"]["level"], e["args"]["p_idx"]) for e in found] == [(2, 6), (2, 6)]


def test_metadata(tmp_path):
    """Facts about a run are lines of metadata, their values strings."""
    log = tracer.initialize_log(tmp_path / "run.pfw")
    log.log_metadata_event("model", "U-Net")
    dft_fn("a").log_metadata("layers", 5)
    log.set_app_metadata_int("ranks", 8)
    log.set_app_metadata_string("machine", 'the "big" one')
    log.finalize()
    lines = [line for line in read(tmp_path / "run.pfw.gz") if line["name"] == "CM"]
    assert [(line["args"]["name"], line["args"]["value"]) for line in lines] == [
        ("model", "U-Net"),
        ("layers", "5"),
        ("ranks", "8"),
        ("machine", 'the "big" one'),
    ]
    assert {(line["ph"], line["cat"], line["id"]) for line in lines} == {("M", "dftracer", 6)}


def test_whatever_the_program_says_is_json(traced):
    """Quotes, newlines, NaN, large integers, objects and odd keys are written, and training goes on."""

    class Odd:
        def __repr__(self):
            raise RuntimeError

    odd = {"quote": '"\n\\', "nan": float("nan"), "big": 2**31, "huge": 2**70, 3: Odd(), "list": [1, {"a": 2}]}
    odd |= {"control": "\x00\x1f", "half": "\ud800"}

    def work():
        with dft_fn('cat"\n', name='na"me\\', epoch=2**40) as event:
            event.update(args=odd)
        tracer.get_instance().log_event('x"', "a", 0, 0, odd)

    first, second = traced(work)
    assert (first["cat"], first["name"], second["name"]) == ('cat"\n', 'na"me\\', 'x"')
    args = own(first)
    assert args["epoch"] == 2**40
    assert (args["quote"], args["nan"], args["big"], args["huge"]) == ('"\n\\', "NaN", 2**31, str(2**70))
    assert (args["3"], args["list"], args["control"]) == ("<Odd: RuntimeError>", [1, {"a": 2}], "\x00\x1f")
    assert own(second) == {key: value for key, value in args.items() if key != "epoch"}


# Processes.

WORKERS = """
    import torch
    from torch.utils.data import DataLoader, Dataset
    from dftracer.logger import dft_fn, dftracer

    events = dft_fn("data")

    class Squares(Dataset):
        def __len__(self):
            return 64

        @events.log
        def __getitem__(self, image_idx):
            return torch.tensor(image_idx**2)

    log = dftracer.initialize_log("run.pfw", None, -1)  # also run by workers that are spawned

    if __name__ == "__main__":
        loader = DataLoader(Squares(), batch_size=8, num_workers=2, multiprocessing_context="{method}")
        assert sum(int(batch.sum()) for batch in events.iter(loader)) == sum(n**2 for n in range(64))
        log.finalize()
"""


def test_workers_of_a_data_loader(tmp_path):
    """Each worker runs the program's first lines again, and writes a file of its own; DFTracer has none of it."""
    run_script(WORKERS.replace("{method}", "spawn"), tmp_path)
    assert "run.pfw.gz" in files(tmp_path)
    assert len(files(tmp_path)) == 3
    found = [event for name in files(tmp_path) for event in user(read(tmp_path / name))]
    items = [event for event in found if event["name"] == "Squares.__getitem__"]
    assert sorted(own(event)["image_idx"] for event in items) == list(range(64))
    assert len({event["pid"] for event in items}) == 2
    assert [event["name"] for event in user(read(tmp_path / "run.pfw.gz"))] == ["loop.iter", "loop.yield"] * 8


def test_forked_process_with_a_file_of_its_own(tmp_path):
    """A forked process that calls initialize_log with another name writes there, and leaves its parent's file alone."""
    source = """
        import multiprocessing
        from dftracer.logger import dft_fn, dftracer
        def work():
            log = dftracer.initialize_log("child.pfw")
            with dft_fn("child"): pass
            log.finalize()
        log = dftracer.initialize_log("parent.pfw")
        with dft_fn("parent"): pass
        process = multiprocessing.get_context("fork").Process(target=work)
        process.start()
        process.join()
        assert process.exitcode == 0
        with dft_fn("parent"): pass
        log.finalize()
    """
    run_script(source, tmp_path)
    assert files(tmp_path) == ["child.pfw.gz", "parent.pfw.gz"]
    assert [event["cat"] for event in user(read(tmp_path / "child.pfw.gz"))] == ["child"]
    assert [event["cat"] for event in user(read(tmp_path / "parent.pfw.gz"))] == ["parent"] * 2
