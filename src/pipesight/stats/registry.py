"""Features by namespace: what a configuration may name, and what serves an API call.

A feature is a class with a decorator; the methods that serve API calls have one too. ::

    from pipesight.stats.registry import api_method, register_feature

    @register_feature(namespace="base")
    class CountCalls:
        '''Count how often a tensor comes by.'''

        @api_method
        def log_tensor_stats(self, config, layer_name, **kwargs):
            ...

A class may say what its settings may be, and they are checked when a configuration is read: ``keys`` (a set of words),
``statistics`` (a mapping from the names that ``stats`` may hold) and ``tensors`` (a set of names). What it leaves
out or sets to ``None`` is not checked.
"""

from __future__ import annotations

import inspect
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, TypeVar

from pipesight.stats._feature_files import execute, python_files, target_of
from pipesight.stats.config_errors import nearest

__all__ = [
    "BASE",
    "ENTRY_POINTS",
    "Namespace",
    "Registry",
    "api_method",
    "default_registry",
    "register_feature",
    "register_namespace_api",
]

C = TypeVar("C", bound=type)
F = TypeVar("F", bound=Callable[..., Any])

BASE = "base"
ENTRY_POINTS = "pipesight.stats.features"


@dataclass(slots=True)
class Namespace:
    """The features of one namespace.

    Attributes:
        api: The object of the extension that routes calls of this namespace, if an extension brought one.
        features: A feature object by name.
        feat_api_to_features: The names of the features that serve an API call, by the name of the call.
        deferred_features: Always empty. Features here need not wait for the API of their namespace.
    """

    name: str
    api: Any = None
    features: dict[str, Any] = field(default_factory=dict)
    feat_api_to_features: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    deferred_features: list[type] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Entry:
    """A registered class."""

    cls: type
    stand_in: bool


class Registry:
    """The features that one session knows.

    Example::

        >>> registry = default_registry().copy()
        >>> registry.load_feature_dirs(["my_features"])
        >>> registry.list_features()
        ['base.CountCalls', 'base.LogTensorStats']

    Attributes:
        data: A `Namespace` by name.
    """

    def __init__(self) -> None:
        self.data: dict[str, Namespace] = {}
        self._entries: dict[tuple[str, str], _Entry] = {}
        self._apis: dict[str, type] = {}
        self._loaded: set[Path] = set()

    def copy(self) -> Registry:
        """Return a registry of the same classes, each with an object of its own."""
        new = Registry()
        for namespace, api in self._apis.items():
            new.add_namespace_api(api, namespace)
        for (namespace, name), entry in self._entries.items():
            new.add(entry.cls, namespace, name, stand_in=entry.stand_in)
        return new

    def reset(self) -> None:
        """Forget everything."""
        for contents in (self.data, self._entries, self._apis, self._loaded):
            contents.clear()

    def add(self, cls: type, namespace: str = BASE, name: str | None = None, *, stand_in: bool = False) -> None:
        """Add a feature class. The same class again changes nothing.

        Args:
            cls: The class; it is called without arguments.
            namespace: Where a configuration finds it.
            name: What a configuration calls it; by default the name of the class.
            stand_in: Whether a class of the same name that comes later may take its place.

        Raises:
            ValueError: Another class has that name.
        """
        name = name or cls.__name__
        _check_declarations(cls)
        known = self._entries.get((namespace, name))
        if known is not None and known.cls is cls:
            return
        if known is not None and _origin(known.cls) != _origin(cls):
            if stand_in and not known.stand_in:
                return
            if not known.stand_in:
                raise ValueError(
                    f"two features are called {namespace}.{name} ({_place(known.cls)} and {_place(cls)}); "
                    f"rename one: register_feature(namespace={namespace!r}, name=...)"
                )
        feature = _object(cls)
        space = self._namespace(namespace)
        space.features[name] = feature
        self._entries[namespace, name] = _Entry(cls, stand_in)
        for names in space.feat_api_to_features.values():
            if name in names:
                names.remove(name)
        for method in _api_names(cls):
            space.feat_api_to_features[method].append(name)

    def add_namespace_api(self, cls: type, namespace: str) -> None:
        """Add the class that routes the API calls of a namespace; the last one counts."""
        self._namespace(namespace).api = _object(cls)
        self._apis[namespace] = cls

    def register_feature(
        self, namespace: str = BASE, name: str | None = None, *, stand_in: bool = False
    ) -> Callable[[C], C]:
        """Return a decorator that makes a class a feature. See `add`."""

        def register(cls: C) -> C:
            for registry in self._targets(cls):
                registry.add(cls, namespace, name, stand_in=stand_in)
            return cls

        return register

    def register_namespace_api(self, namespace: str) -> Callable[[C], C]:
        """Return a decorator that makes a class the API of a namespace. See `add_namespace_api`."""

        def register(cls: C) -> C:
            for registry in self._targets(cls):
                registry.add_namespace_api(cls, namespace)
            return cls

        return register

    def _targets(self, cls: type) -> list[Registry]:
        """Return where a class belongs when a file that some registry is loading registers it here.

        Ordinary modules are run once a process, so what they register must outlive the session that imported them
        first. Files of feature folders are run for each session, and belong to it alone.
        """
        loading = target_of()
        if loading is None or self is not default_registry():
            return [self]
        registry, module = loading
        return [registry] if cls.__module__ == module else [self, registry]

    def validate_and_init(self) -> None:
        """Tell the API object of each namespace its name and features.

        Raises:
            TypeError: One of them cannot route calls.
        """
        for namespace, space in self.data.items():
            if space.api is None:
                continue
            if not callable(getattr(type(space.api), "route_api", None)):
                raise TypeError(
                    f"the API of a namespace must have a method route_api (namespace: {namespace}, "
                    f"API: {_place(type(space.api))}); derive it from BaseNamespaceAPI"
                )
            space.api.name = namespace
            space.api.set_default_api_impl()
            space.api.set_api_map(space.feat_api_to_features)
            space.api.set_features(space.features)

    def load_feature_dirs(self, dirs: str | Path | Iterable[str | Path] | None) -> None:
        """Run every Python file of some folders and of the folders in them, for the features they register.

        A folder that was loaded before is not run again.

        Raises:
            FileNotFoundError: A folder is missing.
            ImportError: A file cannot be run; the error it raised is the cause.
        """
        for file in python_files(dirs):
            if file not in self._loaded:
                execute(file, self)
                self._loaded.add(file)

    def load_entry_points(self) -> None:
        """Import what installed packages offer as features, under the entry points ``pipesight.stats.features``.

        An entry point is a module that registers its features, or a class; a class without a decorator belongs to the
        base namespace.

        Raises:
            ImportError: One of them cannot be imported.
        """
        for point in entry_points(group=ENTRY_POINTS):
            try:
                loaded = point.load()
            except Exception as error:
                raise ImportError(
                    f"cannot import the features {point.value!r} ({type(error).__name__}: {error}); repair or "
                    f"uninstall {point.dist.name if point.dist else 'the package that offers them'}"
                ) from error
            for (namespace, name), entry in default_registry()._entries.items():
                if entry.cls is loaded or entry.cls.__module__ == getattr(loaded, "__name__", None):
                    self.add(entry.cls, namespace, name, stand_in=entry.stand_in)
            if inspect.isclass(loaded) and all(entry.cls is not loaded for entry in self._entries.values()):
                self.add(loaded)

    @property
    def namespaces(self) -> tuple[str, ...]:
        """The names of the namespaces, the base namespace first."""
        return (BASE, *sorted(name for name in self.data if name != BASE))

    def feature_names(self, namespace: str = BASE) -> tuple[str, ...]:
        """Return the names of the features of a namespace."""
        return tuple(self.data[namespace].features) if namespace in self.data else ()

    def feature(self, namespace: str, name: str) -> Any:
        """Return a feature object.

        Raises:
            KeyError: There is none of that name.
        """
        return self.data[namespace].features[name]

    def features_for(self, api_name: str, namespace: str = BASE) -> Mapping[str, Any]:
        """Return the features that serve an API call, by name, in the order they were registered."""
        if namespace not in self.data:
            return {}
        space = self.data[namespace]
        return {name: space.features[name] for name in space.feat_api_to_features.get(api_name, ())}

    def list_features(self) -> list[str]:
        """Return the features as ``namespace.name``."""
        return [f"{space}.{name}" for space in self.namespaces for name in sorted(self.feature_names(space))]

    def explain_features(self, names: str | Iterable[str] = "all") -> str:
        """Return what features say of themselves, one, several or ``"all"``.

        A name may leave out its namespace.

        Raises:
            ValueError: There is no such feature.
        """
        known = self.list_features()
        asked = known if names == "all" else [names] if isinstance(names, str) else list(names)
        chapters = []
        for name in asked:
            found = [full for full in known if name in (full, full.partition(".")[2])]
            if not found:
                raise ValueError(f"unknown feature {name!r}{nearest(name, known)}")
            chapters += [_chapter(full, self.feature(*full.split(".", 1))) for full in found]
        return "\n\n".join(dict.fromkeys(chapters))

    def _namespace(self, name: str) -> Namespace:
        return self.data.setdefault(name, Namespace(name))


_DEFAULT = Registry()


def default_registry() -> Registry:
    """Return the registry that decorators fill; a session works on a copy of it."""
    return _DEFAULT


def register_feature(namespace: str = BASE, name: str | None = None, *, stand_in: bool = False) -> Callable[[C], C]:
    """Return a class decorator that registers a feature.

    Args:
        namespace: The key that a configuration names it under; ``base`` needs none.
        name: What a configuration calls it; by default, the name of the class.
        stand_in: Whether another class of the same name may replace it.
    """
    return default_registry().register_feature(namespace, name, stand_in=stand_in)


def register_namespace_api(namespace: str) -> Callable[[C], C]:
    """Return a decorator that makes a class the API of a namespace."""
    return default_registry().register_namespace_api(namespace)


def api_method(method: F) -> F:
    """Mark a method of a feature: it serves the API call of the same name, such as ``log_tensor_stats``."""
    method.is_api = True  # type: ignore[attr-defined]
    return method


def _api_names(cls: type) -> list[str]:
    return [name for name in dir(cls) if not name.startswith("_") and getattr(getattr(cls, name), "is_api", False)]


def _object(cls: type) -> Any:
    try:
        return cls()
    except Exception as error:
        error.add_note(f"the class of a feature must need no arguments ({_place(cls)})")
        raise


def _origin(cls: type) -> tuple[str, str]:
    """Return what tells two classes of one name from one class that was run twice."""
    return _file(cls) or cls.__module__, cls.__qualname__


def _file(cls: type) -> str | None:
    file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    return str(Path(file).resolve()) if file else None


def _place(cls: type) -> str:
    return f"{cls.__qualname__} in {_file(cls) or cls.__module__}"


def _check_declarations(cls: type) -> None:
    for attribute in ("keys", "statistics", "tensors"):
        words = getattr(cls, attribute, None)
        if words is None:
            continue
        if (
            isinstance(words, str)
            or not isinstance(words, Iterable)
            or not all(isinstance(word, str) for word in words)
        ):
            kind = "a mapping from names" if attribute == "statistics" else "a set of names"
            raise TypeError(f"{attribute} of a feature must be {kind} or None ({_place(cls)}: {words!r})")


def _chapter(name: str, feature: Any) -> str:
    text = inspect.cleandoc(type(feature).__doc__ or "(no docstring)")
    return f"{name}\n" + "\n".join(f"    {line}".rstrip() for line in text.splitlines())
