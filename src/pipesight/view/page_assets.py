"""The files that pages are made of, joined into one: templates, the style, and scripts.

Scripts are ES modules. They become one script here: each keeps a scope of its own, and none is fetched. The policy of a
page allows this script and this style, by their hashes, and nothing else.
"""

from __future__ import annotations

import base64
import hashlib
import html
import re
from collections.abc import Mapping
from functools import cache
from importlib.resources import files

__all__ = ["fill_page", "fill_part"]


def fill_page(
    name: str, *, title: str, values: Mapping[str, str], script: str | None = None, served: bool = False
) -> str:
    """Return a page: the head that all pages share, and the body from ``assets/NAME.html``.

    ``values`` are what stands for ``{{key}}`` in the templates, as HTML; ``script`` is the module to start with, if
    any. A page that is ``served`` may ask its server for more.
    """
    style, joined = _style(), "" if script is None else _script(script)
    known = {
        "policy": _policy(style, joined, served=served),
        "title": html.escape(title),
        "style": style,
        "script": joined,
        "logo": _asset("logo.svg").strip(),
        "addresses": "",
        "incomplete": "",
        "plans": "",
        **values,
    }
    return _filled(_asset("head.html") + _asset(f"{name}.html"), known)


def fill_part(name: str, values: Mapping[str, str]) -> str:
    """Return a part of a page, from ``assets/NAME.html``."""
    return _filled(_asset(f"{name}.html"), values)


def _filled(template: str, values: Mapping[str, str]) -> str:
    return re.sub(r"\{\{(\w+)\}\}", lambda match: values[match[1]], template)


def _policy(style: str, script: str, *, served: bool) -> str:
    """Allow this style and this script, by their hashes, and nothing else."""
    rules = {
        "default-src": "'none'",
        "script-src": _hash(script) if script else "'none'",
        "style-src": _hash(style),
        "img-src": "data:",
        "connect-src": "'self'" if served else "'none'",
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    return "; ".join(f"{name} {value}" for name, value in rules.items())


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


_IMPORT = re.compile(r'^import (?:\{(?P<names>[^}]*)\} from )?"\./(?P<file>[\w.]+)";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:const|let|class|function|async function) (?P<name>\w+))", re.MULTILINE)


@cache
def _asset(name: str) -> str:
    return (files("pipesight.view") / "assets" / name).read_text(encoding="utf-8")


@cache
def _style() -> str:
    return re.sub(r"/\*.*?\*/\n?", "", _asset("style.css"), flags=re.DOTALL)


@cache
def _script(main: str) -> str:
    """Join a module and all that it imports, each before those that import it."""
    joined: dict[str, str] = {}
    _join(main, joined, ())
    return "\n".join([*(text for name, text in joined.items() if name != main), _body(main)])


def _join(name: str, joined: dict[str, str], above: tuple[str, ...]) -> None:
    if name in joined:
        return
    if name in above:
        raise ImportError(f"scripts of the page must not import each other in a circle: {' -> '.join([*above, name])}")
    for match in _IMPORT.finditer(_asset(name)):
        _join(match["file"], joined, (*above, name))
    exports = ", ".join(match["name"] for match in _EXPORT.finditer(_asset(name)))
    joined[name] = f"const {_variable(name)} = (() => {{\n{_body(name)}return {{ {exports} }};\n}})();"


def _body(name: str) -> str:
    def imported(match: re.Match[str]) -> str:
        return f"const {{{match['names']}}} = {_variable(match['file'])};\n" if match["names"] else ""

    return _EXPORT.sub("", _IMPORT.sub(imported, _asset(name)))


def _variable(name: str) -> str:
    return "$" + name.removesuffix(".js")
