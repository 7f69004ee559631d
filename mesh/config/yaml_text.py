"""Values of a configuration as YAML.

Read and written in C if the library was built with it, which takes a fifth of the time.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

try:
    from yaml import CSafeDumper as QuickDumper
    from yaml import CSafeLoader as QuickLoader
except ImportError:
    from yaml import SafeDumper as QuickDumper  # type: ignore[assignment]
    from yaml import SafeLoader as QuickLoader  # type: ignore[assignment]

# Each level of nesting takes some 400 bytes of the stack in C, and a thread may have no more than 512 KiB. A level
# needs a bracket, or a place among the characters with which a line begins; such a place may begin two.
_QUICK = 200
_DEEP_LINE = re.compile(rf"[ \t?:-]{{{_QUICK}}}")
# Characters; no value is broken into several lines.
_WIDTH = 1 << 20


class _Loader(yaml.SafeLoader):
    pass


class _QuickLoader(QuickLoader):
    pass


class _Dumper(yaml.SafeDumper):
    pass


class _QuickDumper(QuickDumper):
    pass


# `1e-6` and `1.5e6` are numbers, as in YAML 1.2; to the older YAML of the library they are texts.
for _kind in (_Loader, _QuickLoader, _Dumper, _QuickDumper):
    _kind.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"^[-+]?(\.[0-9]+|[0-9]+\.[0-9]*|[0-9]+(?=[eE]))([eE][-+]?[0-9]+)?$"),
        list("-+.0123456789"),
    )


def parse(text: str) -> Any:
    """The value of a document.

    Raises:
        yaml.YAMLError: it is none.
    """
    try:
        return yaml.load(text, _Loader if _may_be_deep(text) else _QuickLoader)  # noqa: S506 - safe loaders
    except RecursionError:
        raise yaml.MarkedYAMLError(problem="it is nested too deeply") from None


def _may_be_deep(text: str) -> bool:
    return text.count("[") + text.count("{") >= _QUICK or _DEEP_LINE.search(text) is not None


def write(value: Any) -> str:
    """A document, its keys in their order."""
    text: str = yaml.dump(value, Dumper=_QuickDumper, sort_keys=False, allow_unicode=True)
    return text


def in_line(value: Any) -> str:
    """`[a, 1]`, `{b: true}`, `1.0e-06`, `'1'`."""
    text: str = yaml.dump(value, Dumper=_Dumper, default_flow_style=True, width=_WIDTH, allow_unicode=True)
    # YAML ends a bare value with a mark of its own.
    return text.rstrip("\n").removesuffix("\n...")
