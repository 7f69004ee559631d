"""The refusals that docs/chat-templates.md lists are those that rows can meet."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tests.repository import REPOSITORY
from tests.sources import parsed

_ERRORS = ("ChatTemplateError", "DataError")


def listed() -> list[str]:
    """The messages of the table."""
    _, _, rest = (REPOSITORY / "docs" / "chat-templates.md").read_text().partition("## What is refused\n")
    section = rest.partition("\n## ")[0]
    return [row.strip() for row in re.findall(r"^\|([^|]+)\|", section, re.MULTILINE)][2:]


def written() -> Iterator[re.Pattern[str]]:
    """The messages of errors in the code; any text may stand in the place of a value."""
    for path in [*(REPOSITORY / "mesh" / "chat").glob("*.py"), *(REPOSITORY / "learner" / "data").rglob("*.py")]:
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _ERRORS and node.args:
                message = node.args[0]
                parts = message.values if isinstance(message, ast.JoinedStr) else [message]
                yield re.compile("".join(re.escape(p.value) if isinstance(p, ast.Constant) else ".+" for p in parts))


def test_the_refusals_are_those_of_the_code() -> None:
    # A pattern that is nothing but a value matches anything.
    patterns = [pattern for pattern in written() if re.search(r"\w", pattern.pattern)]
    messages = listed()
    assert len(messages) > 5
    assert [message for message in messages if not any(pattern.fullmatch(message) for pattern in patterns)] == []
