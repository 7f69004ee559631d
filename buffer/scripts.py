"""The Lua verbs: read from the package, put together with their shared part, run by digest.

Invariant: a verb is one atomic script; it is sent by digest, and loaded (again) when Redis does not know it, for
instance after its restart.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files

# Verbs that need more than the common part.
_PARTS: Mapping[str, tuple[str, ...]] = {
    "seed": ("withdraw",),
    "resume": ("withdraw", "go_on"),
    "reassert": ("restart", "go_on"),
    "expire": ("restart",),
    "sample": ("leased",),
    "attach": ("leased", "hand_out"),
    "admit": ("hand_out",),
    "write": ("holding",),
    "member": ("holding",),
}
_CALL = re.compile(r"redis\.p?call\('([A-Z]+)'")
# What every verb begins with, in this order; before it stands the clock.
_COMMON = ("common", "prompts", "record", "lineage", "transitions")
_SHARED = frozenset({"clock", *_COMMON, "withdraw", "leased", "hand_out", "restart", "go_on", "holding"})


@dataclass(frozen=True, slots=True)
class Script:
    """A verb's source and its SHA-1 digest, by which Redis knows it."""

    name: str
    source: str
    digest: str


def load_scripts(clock: str | None = None, guard: str = "") -> dict[str, Script]:
    """All verbs by name.

    Args:
        clock: Lua source that defines `now_ms()`; none: Redis TIME.
        guard: Lua source that every verb begins with.
    """
    folder = files("buffer") / "lua"
    texts = {
        item.name.removesuffix(".lua"): item.read_text(encoding="utf-8")
        for item in folder.iterdir()
        if item.name.endswith(".lua")
    }
    prelude = guard + (clock or texts["clock"]) + "".join(texts[name] for name in _COMMON)
    scripts = {}
    for name in sorted(texts.keys() - _SHARED):
        source = prelude + "".join(texts[part] for part in _PARTS.get(name, ())) + texts[name]
        scripts[name] = Script(name, source, hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest())
    return scripts


def commands_of(scripts: Mapping[str, Script]) -> list[str]:
    """The Redis commands that verbs call, by name."""
    return sorted({name for script in scripts.values() for name in _CALL.findall(script.source)})


def command_at(script: Script, line: int) -> str:
    """The command that is called in a line of a verb (counted from 1, as Redis does); '' where there is none."""
    lines = script.source.splitlines()
    found = _CALL.search(lines[line - 1]) if 0 < line <= len(lines) else None
    return found[1] if found else ""
