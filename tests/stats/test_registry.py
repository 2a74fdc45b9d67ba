"""Features by namespace: decorators, folders of features, entry points, and what they say of themselves."""

import subprocess
import sys
import textwrap

import pytest

from pipesight.stats import registry as registry_module
from pipesight.stats.registry import Registry, api_method, default_registry, register_feature
from support.processes import STRICT_PYTHON

FEATURE = """\
from pipesight.stats.registry import api_method, register_feature

@register_feature({arguments})
class {name}:
    '''{doc}'''

    @api_method
    def log_tensor_stats(self, config, layer_name, **kwargs):
        return {{"from": __file__}}
"""


def feature(name="Count", arguments="", doc="Counts."):
    return FEATURE.format(name=name, arguments=arguments, doc=doc)


@pytest.fixture
def default(monkeypatch):
    """A default registry for one test."""
    monkeypatch.setattr(registry_module, "_DEFAULT", Registry())
    return default_registry()


@pytest.fixture
def folder(tmp_path):
    """Write files into a folder and return it."""

    def folder(name="features", **files):
        for file, text in files.items():
            path = tmp_path / name / f"{file.replace('__', '/')}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(textwrap.dedent(text))
        return tmp_path / name

    return folder


def test_a_class_becomes_a_feature(default):
    """The decorator returns the class as it is, and its API methods are found by name."""

    @register_feature(namespace="mine", name="Other")
    class Count:
        """Counts."""

        @api_method
        def log_tensor_stats(self, config, layer_name, **kwargs):
            return "served"

        def helper(self):
            """Serves no call."""

    assert isinstance(Count(), Count)
    assert default.feature_names("mine") == ("Other",)
    assert isinstance(default.feature("mine", "Other"), Count)
    assert {
        name: f.log_tensor_stats({}, "l") for name, f in default.features_for("log_tensor_stats", "mine").items()
    } == {"Other": "served"}
    assert default.features_for("helper", "mine") == {}
    assert default.features_for("log_tensor_stats") == {}
    assert default.features_for("log_tensor_stats", "none") == {}


def test_two_features_may_serve_one_call():
    """All features that serve a call are found, in the order they came; inherited methods count."""
    registry = Registry()

    @registry.register_feature()
    class First:
        @api_method
        def call(self):
            """Serve."""

    @registry.register_feature()
    class Second(First):
        pass

    assert list(registry.features_for("call")) == ["First", "Second"]


def test_names_must_be_unique(folder):
    """Two classes of one name in a namespace are an error that names both files; elsewhere they are not."""
    registry = Registry()
    one = folder("one", a=feature())
    two = folder("two", b=feature())
    registry.load_feature_dirs(one)
    with pytest.raises(ImportError) as caught:
        registry.load_feature_dirs(two)
    assert str(one / "a.py") in str(caught.value)
    assert str(two / "b.py") in str(caught.value)
    assert "two features are called base.Count" in str(caught.value)
    registry.load_feature_dirs(folder("three", c=feature(arguments="namespace='other'")))
    assert registry.list_features() == ["base.Count", "other.Count"]


def test_the_same_class_again_is_harmless():
    """A class that is registered twice, or whose code is run twice, is one feature."""
    registry = Registry()

    def define():
        class Count:
            @api_method
            def call(self):
                """Serve."""

        return Count

    first = define()
    registry.add(first)
    made = registry.feature("base", "Count")
    registry.add(first)
    assert registry.feature("base", "Count") is made
    second = define()  # as in a notebook, or in a file that is imported as well as loaded
    registry.add(second)
    assert type(registry.feature("base", "Count")) is second
    assert list(registry.features_for("call")) == ["Count"]


def test_a_stand_in_gives_way():
    """A class that stands in for another is replaced by it, whichever comes first."""

    class Ours:
        pass

    class Theirs:
        pass

    for order in (1, -1):
        registry = Registry()
        for cls, stand_in in [(Ours, True), (Theirs, False)][::order]:
            registry.add(cls, "engine", "Log", stand_in=stand_in)
        assert type(registry.feature("engine", "Log")) is Theirs
        assert type(registry.copy().feature("engine", "Log")) is Theirs


def test_copies_have_objects_of_their_own(default):
    """A session's features start fresh, and what it adds is not seen by others."""
    register_feature()(type("Count", (), {}))
    session = default.copy()
    session.add(type("More", (), {}))
    assert session.feature("base", "Count") is not default.feature("base", "Count")
    assert default.list_features() == ["base.Count"]
    assert session.list_features() == ["base.Count", "base.More"]


def test_folders_are_loaded_with_all_below(folder):
    """Every Python file of a folder and of the folders in it is run, once."""
    registry = Registry()
    path = folder(a=feature("A"), b__c=feature("C"), b__d="import sys; sys.loaded.append(__file__)")
    (path / "b" / "__pycache__").mkdir()
    (path / "b" / "__pycache__" / "x.py").write_text("raise AssertionError")
    (path / "notes.txt").write_text("raise AssertionError")
    sys.loaded = []
    try:
        for dirs in (path, str(path), [path, str(path / "b")], [], None, ""):
            registry.load_feature_dirs(dirs)
        assert registry.list_features() == ["base.A", "base.C"]
        assert len(sys.loaded) == 1
    finally:
        del sys.loaded


def test_features_of_a_folder_belong_to_the_registry_that_loads_it(default, folder):
    """A session knows the features of its own folders alone, even if the same folder is loaded again."""
    path = folder(a=feature("A"))
    first, second, third = (default.copy() for _ in range(3))
    first.load_feature_dirs(path)
    second.load_feature_dirs(path)
    assert first.list_features() == second.list_features() == ["base.A"]
    assert default.list_features() == third.list_features() == []
    (path / "a.py").write_text(feature("A", doc="Changed."))
    third.load_feature_dirs(path)
    assert "Changed." in third.explain_features()


def test_what_a_folder_imports_is_known_to_later_sessions(default, folder, monkeypatch):
    """Features of ordinary modules are registered for good, as Python runs a module once."""
    monkeypatch.syspath_prepend(folder("library", imported_by_a_folder=feature("Shared")))
    path = folder(a="import imported_by_a_folder")
    for _ in range(2):
        session = default.copy()
        session.load_feature_dirs(path)
        assert session.list_features() == ["base.Shared"]


def test_a_file_that_is_loaded_and_imported_is_one_feature(default, folder, monkeypatch):
    """A feature folder that is also a package does not clash with itself."""
    path = folder("imported_too", __init__="", a=feature("A"), b="import imported_too.a")
    monkeypatch.syspath_prepend(path.parent)
    for _ in range(2):
        session = default.copy()
        session.load_feature_dirs(path)
        assert session.list_features() == ["base.A"]


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("x = 1 / 0", "ZeroDivisionError: division by zero"),
        ("def", "SyntaxError: "),
    ],
)
def test_a_file_that_fails_is_named(folder, text, error):
    """A file that cannot be run is an ImportError with the file and the error, and leaves nothing behind."""
    registry = Registry()
    path = folder(bad=text)
    before = {*sys.modules}
    with pytest.raises(ImportError) as caught:
        registry.load_feature_dirs(path)
    assert f"cannot load the features in {path / 'bad.py'} ({error}" in str(caught.value)
    assert not {name for name in {*sys.modules} - before if "bad" in name}
    (path / "bad.py").write_text(feature("Repaired"))
    registry.load_feature_dirs(path)
    assert registry.list_features() == ["base.Repaired"]


def test_a_missing_folder_is_an_error(tmp_path):
    """A folder that is not there is FileNotFoundError; what is no path is a type error."""
    with pytest.raises(FileNotFoundError, match="feature_dirs must be existing folders"):
        Registry().load_feature_dirs(tmp_path / "none")
    with pytest.raises(TypeError, match="feature_dirs must be paths"):
        Registry().load_feature_dirs([3])


def test_dataclasses_may_be_defined_in_feature_files(folder):
    """Files run as modules that Python knows by name, as dataclasses need."""
    registry = Registry()
    text = (
        "from __future__ import annotations\nfrom dataclasses import dataclass\n@dataclass\nclass D:\n    x: int = 0\n"
    )
    registry.load_feature_dirs(folder(a=text))


def test_a_feature_that_cannot_be_made_is_named():
    """A constructor that needs arguments is an error that names the class."""
    registry = Registry()

    class Needy:
        def __init__(self, x):
            self.x = x

    with pytest.raises(TypeError) as caught:
        registry.add(Needy)
    assert "must need no arguments" in caught.value.__notes__[0]
    assert registry.list_features() == []


@pytest.mark.parametrize("declared", [{"keys": "freq"}, {"keys": [3]}, {"statistics": 5}, {"tensors": b"x"}])
def test_declarations_must_be_names(declared):
    """Keys, statistics and tensors that are no collections of names are a type error."""
    with pytest.raises(TypeError, match="of a feature must be"):
        Registry().add(type("Odd", (), declared))


def test_explanations_are_docstrings():
    """Features explain themselves, by full name, by name, or all."""
    registry = Registry()

    class Count:
        """Counts.

        Config:
            freq: how often
        """

    registry.add(Count)
    registry.add(Count, "other")
    registry.add(type("Silent", (), {"__doc__": None}))
    assert registry.explain_features("base.Count") == "base.Count\n    Counts.\n\n    Config:\n        freq: how often"
    assert registry.explain_features(["Count"]).count("Counts.") == 2
    assert (
        registry.explain_features("all")
        == registry.explain_features()
        == registry.explain_features(registry.list_features())
    )
    assert "Silent\n    (no docstring)" in registry.explain_features("Silent")
    with pytest.raises(ValueError, match=r"unknown feature 'Cuont'"):
        registry.explain_features("Cuont")
    with pytest.raises(ValueError, match=r"did you mean 'base.Count'\?"):
        registry.explain_features("base.Cont")


def test_log_tensor_stats_calls_what_is_not_routed():
    """A feature of a namespace that others route is not called by ``log_tensor_stats``; a stand-in there still is."""
    registry = Registry()

    class Log:
        @api_method
        def log_tensor_stats(self):
            """Serve."""

    registry.add(Log)
    registry.add(Log, "engine", "Theirs")
    registry.add(Log, "engine", "Ours", stand_in=True)
    names = [("base", "Log"), ("engine", "Theirs"), ("engine", "Ours")]
    assert [type(registry.logs(*name)) for name in names] == [Log] * 3
    registry.routed.add("engine")
    assert [type(registry.logs(*name)) for name in names] == [Log, type(None), Log]


def test_reset_keeps_the_built_in_features():
    """What was registered is forgotten, and a feature that took the place of a built-in one gives it back."""
    import pipesight.stats.builtin_features  # noqa: F401 (registers them)

    registry = default_registry().copy()
    built_in = registry.list_features()
    assert "transformer_engine.LogTensorStats" in built_in
    registry.add(type("Mine", (), {}))
    theirs = type("LogTensorStats", (), {"__module__": "transformer_engine.features"})
    registry.add(theirs, "transformer_engine")
    assert type(registry.feature("transformer_engine", "LogTensorStats")) is theirs
    registry.reset()
    assert registry.list_features() == built_in
    assert type(registry.feature("transformer_engine", "LogTensorStats")) is not theirs


def test_files_of_a_folder_import_each_other(folder):
    """A file imports its neighbours by name, those of its own folder even if another has the same name."""
    text = "from pipesight.stats.registry import register_feature\nfrom shared_words import NAME\n"
    text += "register_feature(name=NAME)(type('Any', (), {}))"
    for name in ("One", "Two"):
        registry = Registry()
        registry.load_feature_dirs(folder(name, feature_of_it=text, shared_words=f"NAME = {name!r}"))
        assert registry.list_features() == [f"base.{name}"]
    assert not any(path.endswith(("One", "Two")) for path in sys.path)


ENTRY_POINTS = """\
from pipesight.stats.registry import Registry, default_registry

for _ in range(2):
    registry = default_registry().copy()
    registry.load_entry_points()
    print(registry.list_features())
"""


def test_entry_points_of_installed_packages(folder):
    """Modules and classes that installed packages offer are found, in every session."""
    site = folder("site", offers_module=feature("InModule"), offers_class="class Plain:\n    pass\n")
    info = site / "offers-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: offers\nVersion: 1.0\n")
    points = "[pipesight.stats.features]\nmodule = offers_module\nclass = offers_class:Plain\n"
    (info / "entry_points.txt").write_text(points)
    command = [*STRICT_PYTHON, "-c", ENTRY_POINTS]
    environment = {"PYTHONPATH": str(site), "PATH": ""}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    assert ended.stderr == ""
    assert ended.stdout == "['base.InModule', 'base.Plain']\n" * 2
    (info / "entry_points.txt").write_text("[pipesight.stats.features]\nmodule = offers_nothing\n")
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    assert "ImportError: cannot import the features 'offers_nothing' (ModuleNotFoundError: " in ended.stderr
    assert ended.stderr.rstrip().endswith("repair or uninstall offers")


def test_no_torch_is_imported():
    """Reading configurations and registering features needs no torch."""
    script = "import sys, pipesight.stats.config, pipesight.stats.registry; print('torch' in sys.modules)"
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert ended.stdout == "False\n"
