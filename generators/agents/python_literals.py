"""Values in Python's syntax, as models write them where JSON is meant."""

from __future__ import annotations

import ast
import json
from typing import Any

# Models mix both languages: `{"a": true, "b": None}`.
_JSON_NAMES = {"true": True, "false": False, "null": None}
_ERRORS = (ValueError, TypeError, SyntaxError, RecursionError, MemoryError)


class _JsonNames(ast.NodeTransformer):
    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_JSON_NAMES[node.id]) if node.id in _JSON_NAMES else node


def read_literal(text: str | ast.expr) -> Any:
    """The value of a literal, in the types of JSON: a tuple becomes a list.

    Args:
        text: an expression in Python's syntax, or its tree.

    Raises:
        ValueError: it is no literal, or JSON has no such value.
    """
    try:
        tree = ast.parse(text.strip(), mode="eval").body if isinstance(text, str) else text
        return json.loads(json.dumps(ast.literal_eval(_JsonNames().visit(tree)), allow_nan=False))
    except _ERRORS as error:
        raise ValueError("not a literal") from error
