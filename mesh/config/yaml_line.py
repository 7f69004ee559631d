"""A value of a configuration as YAML writes it in one line."""

from __future__ import annotations

from typing import Any

import yaml

# Characters; no value is broken into several lines.
_WIDTH = 1 << 20


def in_line(value: Any) -> str:
    """`[a, 1]`, `{b: true}`, `1.0e-06`, `'1'`."""
    text: str = yaml.safe_dump(value, default_flow_style=True, width=_WIDTH, allow_unicode=True)
    # YAML ends a bare value with a mark of its own.
    return text.rstrip("\n").removesuffix("\n...")
