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

# Characters. A level of nesting needs one, and takes some of the stack in C: a text of 100,000 brackets overflows it.
_QUICK = 16 << 10
# Characters; no value is broken into several lines.
_WIDTH = 1 << 20


class _Loader(yaml.SafeLoader):
    pass


class _QuickLoader(QuickLoader):
    pass


# `1e-6` is a number, as in YAML 1.2; to the older YAML of the library it is a text.
for _loader in (_Loader, _QuickLoader):
    _loader.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9]+[eE][-+]?[0-9]+$"), list("-+0123456789")
    )


def parse(text: str) -> Any:
    """The value of a document.

    Raises:
        yaml.YAMLError: it is none.
    """
    try:
        return yaml.load(text, _QuickLoader if len(text) < _QUICK else _Loader)  # noqa: S506 - safe loaders
    except RecursionError:
        raise yaml.MarkedYAMLError(problem="it is nested too deeply") from None


def write(value: Any) -> str:
    """A document, its keys in their order."""
    text: str = yaml.dump(value, Dumper=QuickDumper, sort_keys=False, allow_unicode=True)
    return text


def in_line(value: Any) -> str:
    """`[a, 1]`, `{b: true}`, `1.0e-06`, `'1'`."""
    text: str = yaml.safe_dump(value, default_flow_style=True, width=_WIDTH, allow_unicode=True)
    # YAML ends a bare value with a mark of its own.
    return text.rstrip("\n").removesuffix("\n...")
