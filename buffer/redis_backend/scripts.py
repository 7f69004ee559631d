"""The Lua scripts: read from the package, linked with the shared definitions that they need, run by digest.

Invariants
  * A script is atomic. It is sent by digest, and loaded (again) when Redis does not know it, for instance after a
    restart.
  * Scripts share definitions alone, each of which begins a line and needs only those before it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from types import MappingProxyType

_CALL = re.compile(r"redis\.p?call\('([A-Z]+)'")
# Libraries that scripts share (`lua/lib`), each after those that it needs.
_SHARED = (
    "clock", "common", "prompts", "group_record", "lineage", "transitions", "withdraw", "lease_reply", "grant_drafts",
    "redis_restart", "take_over", "write_permission",
)  # fmt: skip
_COMMENT = re.compile(r"^ *--.*\n", re.MULTILINE)
_DEFINITION = re.compile(r"^local (?:function )?(\w+(?:, \w+)*).*\n(?:(?!local ).*\n)*", re.MULTILINE)
_WORD = re.compile(r"\w+")


@dataclass(frozen=True, slots=True)
class Script:
    """A script's source and its SHA-1 digest, by which Redis knows it."""

    name: str
    source: str
    digest: str


@dataclass(frozen=True, slots=True)
class _Definition:
    """A shared function, or variables; `words` are those of its source."""

    names: frozenset[str]
    words: frozenset[str]
    source: str


def sources() -> dict[str, str]:
    """The package's Lua files, scripts and shared parts, by name."""
    folder = files("rollmesh.buffer") / "lua"
    found = (item for each in (folder, folder / "lib") for item in each.iterdir() if item.name.endswith(".lua"))
    return {item.name.removesuffix(".lua"): item.read_text(encoding="utf-8") for item in found}


@cache
def load_scripts(clock: str | None = None, guard: str = "") -> Mapping[str, Script]:
    """All scripts of the package by name, linked once per process; arguments as of `link`."""
    return MappingProxyType(link(sources(), clock, guard))


def link(texts: Mapping[str, str], clock: str | None = None, guard: str = "") -> dict[str, Script]:
    """Scripts by name.

    Args:
        texts: Lua files, as of `sources`.
        clock: Lua source that defines `now_ms()`; none: Redis TIME.
        guard: Lua source that every script begins with.
    """
    code = {name: _COMMENT.sub("", text) for name, text in texts.items()}
    code["clock"] = clock or code["clock"]
    shared = [definition for name in _SHARED for definition in _definitions(code[name])]
    scripts = {}
    for name in sorted(code.keys() - set(_SHARED)):
        source = guard + _linked(shared, code[name])
        scripts[name] = Script(name, source, hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest())
    return scripts


def _definitions(code: str) -> list[_Definition]:
    return [
        _Definition(frozenset(_WORD.findall(found[1])), frozenset(_WORD.findall(found[0])), found[0])
        for found in _DEFINITION.finditer(code)
    ]


def _linked(shared: Sequence[_Definition], verb: str) -> str:
    """A script after the definitions that it needs. Lua makes all of them for every call."""
    needed, parts = set(_WORD.findall(verb)), [verb]
    for definition in reversed(shared):
        if not needed.isdisjoint(definition.names):
            needed |= definition.words
            parts.append(definition.source)
    return "".join(reversed(parts))


def commands_of(scripts: Mapping[str, Script]) -> list[str]:
    """The Redis commands that scripts call, by name."""
    return sorted({name for script in scripts.values() for name in _CALL.findall(script.source)})


def command_at(script: Script, line: int) -> str:
    """The command that a line of a script calls (counted from 1, as Redis does); '' without a call."""
    lines = script.source.splitlines()
    found = _CALL.search(lines[line - 1]) if 0 < line <= len(lines) else None
    return found[1] if found else ""
