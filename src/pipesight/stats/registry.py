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
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, TypeVar

from pipesight.stats._feature_files import execute, python_files, target_of
from pipesight.stats.config_errors import nearest

__all__ = [
    "BASE",
    "ENTRY_POINTS",
    "Registry",
    "api_method",
    "api_names",
    "default_registry",
    "register_feature",
]

C = TypeVar("C", bound=type)
F = TypeVar("F", bound=Callable[..., Any])

BASE = "base"
ENTRY_POINTS = "pipesight.stats.features"


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
        routed: Namespaces whose features are called in another way than by `log_tensor_stats`.
    """

    def __init__(self) -> None:
        self.routed: set[str] = set()
        self._features: dict[str, dict[str, Any]] = {}
        self._entries: dict[tuple[str, str], _Entry] = {}
        self._own: dict[tuple[str, str], _Entry] = {}
        self._loaded: set[Path] = set()

    def copy(self) -> Registry:
        """Return a registry of the same classes, each with an object of its own."""
        new = Registry()
        for (namespace, name), entry in self._entries.items():
            new.add(entry.cls, namespace, name, stand_in=entry.stand_in)
        return new

    def reset(self) -> None:
        """Forget all features but those that pipesight brings."""
        for contents in (self.routed, self._features, self._entries, self._loaded):
            contents.clear()
        for (namespace, name), entry in self._own.items():
            self.add(entry.cls, namespace, name, stand_in=entry.stand_in)

    def add(self, cls: type, namespace: str = BASE, name: str | None = None, *, stand_in: bool = False) -> None:
        """Add a feature class. The same class again changes nothing.

        With ``stand_in``, a class of the same name that comes later may take its place.

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
        self._features.setdefault(namespace, {})[name] = _object(cls)
        self._entries[namespace, name] = entry = _Entry(cls, stand_in)
        if cls.__module__.startswith("pipesight."):
            self._own[namespace, name] = entry

    def register_feature(
        self, namespace: str = BASE, name: str | None = None, *, stand_in: bool = False
    ) -> Callable[[C], C]:
        """Return a decorator that makes a class a feature. See `add`."""

        def register(cls: C) -> C:
            for registry in self.targets(cls):
                registry.add(cls, namespace, name, stand_in=stand_in)
            return cls

        return register

    def targets(self, cls: type) -> list[Registry]:
        """Return where a class belongs when a file that some registry is loading registers it here.

        Ordinary modules are run once a process, so what they register must outlive the session that imported them
        first. Files of feature folders are run for each session, and belong to it alone.
        """
        loading = target_of()
        if loading is None or self is not default_registry():
            return [self]
        registry, module = loading
        return [registry] if cls.__module__ == module else [self, registry]

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
        return (BASE, *sorted(name for name in self._features if name != BASE))

    def feature_names(self, namespace: str = BASE) -> tuple[str, ...]:
        """Return the names of the features of a namespace."""
        return tuple(self._features.get(namespace, ()))

    def feature(self, namespace: str, name: str) -> Any:
        """Return a feature object; ``KeyError`` if there is none of that name."""
        return self._features[namespace][name]

    def features_for(self, api_name: str, namespace: str = BASE) -> Mapping[str, Any]:
        """Return the features that serve an API call, by name, in the order they were registered."""
        features = self._features.get(namespace, {})
        return {name: feature for name, feature in features.items() if api_name in api_names(type(feature))}

    def logs(self, namespace: str, name: str) -> Any:
        """Return the feature if `log_tensor_stats` is to call it, or else ``None``."""
        if namespace in self.routed and not self._entries[namespace, name].stand_in:
            return None
        return self.features_for("log_tensor_stats", namespace).get(name)

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


def api_method(method: F) -> F:
    """Mark a method of a feature: it serves the API call of the same name, such as ``log_tensor_stats``."""
    method.is_api = True  # type: ignore[attr-defined]
    return method


def api_names(cls: type) -> list[str]:
    """Return the API calls that a class serves."""
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
