"""Reading a YAML file into plain values whose lines are known.

The values are built here, node by node, from what PyYAML composes: so duplicate keys are seen, every mistake gets its
line, and no tag makes anything but plain values.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path as FilePath
from typing import Any

import yaml

from pipesight.stats.config_errors import ConfigError, Mistakes, Path, shown

__all__ = ["DictDocument", "YamlDocument", "read_dict", "read_yaml"]

_MAP, _SEQ, _MERGE = "tag:yaml.org,2002:map", "tag:yaml.org,2002:seq", "tag:yaml.org,2002:merge"
_SCALARS = frozenset(
    f"tag:yaml.org,2002:{name}" for name in ("str", "int", "float", "bool", "null", "timestamp", "binary")
)
_TOO_DEEP = "is nested too deeply, or contains itself"
LARGEST = 1 << 20  # bytes of a file: a second or two of reading


class YamlDocument:
    """Plain values of a file, and the nodes they come from."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.value: Any = None
        self.root: yaml.Node | None = None
        self.keys: dict[int, list[Any]] = {}
        """The keys of each mapping node, by the node's id."""
        self.flaws: list[tuple[int, str]] = []
        """Mistakes that leave values to check: lines, and what is wrong there."""

    def line(self, path: Path) -> int | None:
        """Return the line of ``path``, or of the nearest thing around it that there is."""
        node = self.root
        line = 1 if node is None else node.start_mark.line + 1
        for part in path:
            if isinstance(node, yaml.MappingNode):
                found = [i for i, key in enumerate(self.keys.get(id(node), [])) if key == part]
                if not found:
                    break
                key, node = node.value[found[-1]]
                line = key.start_mark.line + 1
            elif isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
                node = node.value[part]
                line = node.start_mark.line + 1
            else:
                break
        return line


class DictDocument:
    """Plain values that never were a file; they are found by their path alone."""

    def __init__(self, value: Any) -> None:
        self.source = ""
        self.value = value
        self.flaws: list[tuple[int, str]] = []

    def line(self, path: Path) -> int | None:
        """Return ``None``: there are no lines."""
        return None


def read_dict(config: Mapping[Any, Any]) -> DictDocument:
    """Copy a mapping into dicts and lists of its own, so that later changes to it do not matter."""
    document = DictDocument(None)
    try:
        document.value = _plain(config)
    except RecursionError:
        raise ConfigError(document.source, [f"the dict {_TOO_DEEP}"]) from None
    return document


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_plain(item) for item in value]
    return value


def read_yaml(file: str | FilePath) -> YamlDocument:
    """Read a file.

    Raises:
        FileNotFoundError: There is none.
        ConfigError: It is no text, or no YAML.
    """
    document = YamlDocument(str(file))
    mistakes = Mistakes(document)
    text = _text(FilePath(file), mistakes)
    if text is not None:
        loader = yaml.SafeLoader("")
        try:
            loader = yaml.SafeLoader(text)
            document.root = loader.get_single_node()
            if document.root is not None:
                document.value = _Builder(loader, document, mistakes).build(document.root)
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            mistakes.at_line(mark.line + 1 if mark else None, f"is not valid YAML: {_reason(error)}")
        except yaml.reader.ReaderError as error:
            line = text.count("\n", 0, error.position) + 1
            mistakes.at_line(line, f"is not valid YAML: character {chr(error.character)!r} is not allowed")
        except RecursionError:
            mistakes.at_line(loader.line + 1, _TOO_DEEP)
        except (ArithmeticError, ValueError) as error:  # such as "\Uffffffff", which is no character
            if isinstance(error, ConfigError):
                raise
            mistakes.at_line(loader.line + 1, f"is not valid YAML: {error}")
        finally:
            loader.dispose()
    if mistakes:
        for line, flaw in document.flaws:
            mistakes.at_line(line, flaw)
        raise mistakes.error()
    return document


def _text(file: FilePath, mistakes: Mistakes) -> str | None:
    try:
        content = _content(file)
    except FileNotFoundError as error:
        raise FileNotFoundError(error.errno, "no such configuration; correct the path", str(file)) from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        mistakes.at_line(None, f"cannot be read: {reason}; pass the path of a YAML file, or a dict")
        return None
    if len(content) > LARGEST:
        mistakes.at_line(None, f"must have {LARGEST >> 20} MiB or less; is this a configuration?")
        return None
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        mistakes.at_line(line, f"is not UTF-8 text (byte {content[error.start]:#04x}); save it as UTF-8")
        return None


def _content(file: FilePath) -> bytes:
    """Read a file, at most a little more than is allowed; one that is none of the disk's would block or never end."""
    handle = os.open(file, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0))
    with open(handle, "rb") as opened:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "it is a pipe or a device")
        return opened.read(LARGEST + 1)


def _reason(error: yaml.MarkedYAMLError) -> str:
    reason = error.problem or error.context or "unknown error"
    if "\\t" in reason:
        reason += "; indent with spaces"
    if error.problem and error.context:
        at = error.context_mark
        reason += f" ({error.context}{f', line {at.line + 1}' if at else ''})"
    return reason


class _Builder:
    """Makes plain values of nodes; a node that aliases repeat is made once."""

    def __init__(self, loader: yaml.SafeLoader, document: YamlDocument, mistakes: Mistakes) -> None:
        self._loader = loader
        self._document = document
        self._mistakes = mistakes
        self._made: dict[int, Any] = {}
        self._making: set[int] = set()
        self._pairs: dict[int, dict[Any, tuple[yaml.Node, yaml.Node]]] = {}
        self._merging: set[int] = set()

    def build(self, node: yaml.Node) -> Any:
        key = id(node)
        if key in self._making:
            self._wrong(node, "contains itself")
            return None
        if key not in self._made:
            self._making.add(key)
            self._made[key] = self._make(node)
            self._making.discard(key)
        return self._made[key]

    def _make(self, node: yaml.Node) -> Any:
        if isinstance(node, yaml.MappingNode) and node.tag == _MAP:
            return self._mapping(node)
        if isinstance(node, yaml.SequenceNode) and node.tag == _SEQ:
            return [self.build(item) for item in node.value]
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node)
        self._wrong(node, f"tag {shown(node.tag)} is not allowed; write plain values")
        return None

    def _scalar(self, node: yaml.ScalarNode) -> Any:
        if node.tag not in _SCALARS:
            self._wrong(node, f"tag {shown(node.tag)} is not allowed; write plain values")
            return None
        kind = node.tag.rpartition(":")[2]
        try:
            value = self._loader.construct_object(node)
            if not isinstance(value, int) or abs(value) < 1 << 63:
                return value
            self._wrong(node, f"a number must fit 64 bits ({shown(node.value)})")
        except yaml.constructor.ConstructorError as error:
            self._wrong(node, f"is not valid YAML: {shown(node.value)} is no {kind} ({error.problem})")
        except (ValueError, ArithmeticError, LookupError) as error:  # such as a date with a 13th month
            self._wrong(node, f"is not valid YAML: {shown(node.value)} is no {kind} ({error})")
        except AttributeError:  # PyYAML does not look whether it is a date at all
            self._wrong(node, f"is not valid YAML: {shown(node.value)} is no {kind}")
        return None

    def _mapping(self, node: yaml.MappingNode) -> dict[Any, Any]:
        lines: dict[Any, int] = {}
        for key_node, _ in node.value:  # before those that << brings in, which may be given again
            key, line = self._key(key_node), key_node.start_mark.line + 1
            if key in lines:
                flaw = f"key {shown(key)} is already given in line {lines[key]}; remove one"
                self._document.flaws.append((line, flaw))
            lines[key] = line
        pairs = self._merged(node)
        node.value, self._document.keys[id(node)] = list(pairs.values()), list(pairs)
        return {key: self.build(value) for key, (_, value) in pairs.items()}

    def _merged(self, node: yaml.MappingNode) -> dict[Any, tuple[yaml.Node, yaml.Node]]:
        """Return the pairs of a mapping by their keys, those that << brings in first, which others override.

        PyYAML keeps all of them, which are exponentially many if mappings bring in mappings that do.
        """
        if id(node) in self._merging:
            self._wrong(node, "contains itself")
            return {}
        if id(node) in self._pairs:
            return self._pairs[id(node)]
        self._merging.add(id(node))
        pairs: dict[Any, tuple[yaml.Node, yaml.Node]] = {}
        own: dict[Any, tuple[yaml.Node, yaml.Node]] = {}
        for key, value in node.value:
            if key.tag != _MERGE:
                own[self._key(key)] = key, value
                continue
            sources = value.value if isinstance(value, yaml.SequenceNode) else [value]
            for source in reversed(sources):  # the first of them decides
                if isinstance(source, yaml.MappingNode):
                    pairs.update(self._merged(source))
                else:
                    self._wrong(source, "<< must be followed by a mapping, or by a list of mappings")
        self._merging.discard(id(node))
        self._pairs[id(node)] = {**pairs, **own}
        return self._pairs[id(node)]

    def _key(self, node: yaml.Node) -> Any:
        if isinstance(node, yaml.ScalarNode):
            return node.value if node.tag == _MERGE else self._scalar(node)
        self._wrong(node, "a key must be a word")
        return str(id(node))

    def _wrong(self, node: yaml.Node, text: str) -> None:
        self._mistakes.at_line(node.start_mark.line + 1, text)
