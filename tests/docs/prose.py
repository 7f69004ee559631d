"""Sentences of docstrings and comments in Python, Lua and proto files.

A paragraph ends at a blank line, bullet, row of a table or command, and at an item of a section such as `Args:`. Code
in backquotes is one word. Comments that only instruct tools (`# noqa`, `# type: ignore`) are not prose.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.repository import REPOSITORY
from tests.sources import parsed

LONGEST_SENTENCE = 25
# Idioms of another language, word for word.
TRANSLATED = re.compile(
    r"\b(anew|go(es)? on|went on|nobody|whoever|at hand|let(s|ting)? go of|makes? up for|made up for|says? again"
    r"|said again|for want of|as good as (once|none))\b",
    re.IGNORECASE,
)
# The trees of these packages are kept for other tests.
_PARSED = ("buffer", "generators", "learner", "mesh", "reward_service", "rollmesh")
MARKERS = {".lua": "--", ".proto": "//"}
_DIRECTIVE = re.compile(r"(!|noqa|type: ignore|pragma|fmt:)")
_SECTION = re.compile(r"(Args|Attributes|Invariants|Raises|Returns|Yields|Keys|Example):$")
# Python's own tokens, of which only these matter: to make all of them took half of the time.
_STRING_OR_COMMENT = re.compile(
    r"""
    (\"{3}|'{3}) (?: [^\\] | \\. )*? \1
    | " (?: [^"\\\n] | \\. )* "
    | ' (?: [^'\\\n] | \\. )* '
    | (?P<comment> \#[^\n]* )
    """,
    re.DOTALL | re.VERBOSE,
)
_ITEM = re.compile(r"(\w[\w*, /`.\[\]]*|\*+\w+): ")
_ROW = re.compile(r"([-*]|\d+\.) |(ARGV|KEYS|Answer)\b|python -m |.*\S {3,}\S")


class Block(NamedTuple):
    """A docstring, or successive lines of comments; `line` is the line where it begins."""

    line: int
    text: str
    is_docstring: bool


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """A module, or a statement, and all that stand in it; most nodes of a tree are expressions, and none of these."""
    left = [node]
    while left:
        each = left.pop()
        yield each
        for part in ("body", "handlers", "orelse", "finalbody", "cases"):
            left.extend(getattr(each, part, ()))


def _docstrings(tree: ast.Module) -> Iterator[Block]:
    for node in statements(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield Block(node.lineno, node.value.value, True)


def _joined(comments: Iterator[tuple[int, int, str]]) -> Iterator[Block]:
    """Comments as blocks, of (line, column, text); a comment in the next line and the same column continues one."""
    first, column, lines = 0, 0, list[str]()
    for line, at, text in comments:
        if lines and (line, at) == (first + len(lines), column):
            lines.append(text)
            continue
        yield Block(first, "\n".join(lines), False)
        first, column, lines = line, at, [text]
    yield Block(first, "\n".join(lines), False)


def _python_comments(source: str) -> Iterator[tuple[int, int, str]]:
    line, seen = 1, 0
    for found in _STRING_OR_COMMENT.finditer(source):
        if found["comment"] is None:
            continue
        begin = found.start()
        line, seen = line + source.count("\n", seen, begin), begin
        text = found["comment"].removeprefix("#").strip()
        if not _DIRECTIVE.match(text):
            yield line, begin - source.rfind("\n", 0, begin) - 1, text


def _marked_comments(source: str, marker: str) -> Iterator[tuple[int, int, str]]:
    for number, line in enumerate(source.splitlines(), 1):
        code, found, text = line.partition(marker)
        if found and code.count('"') % 2 == 0:
            yield number, len(code), text.strip()


def blocks(path: Path) -> list[Block]:
    """All docstrings and comments of a file."""
    source = path.read_text()
    if path.suffix == ".py":
        tree = parsed(path) if path.relative_to(REPOSITORY).parts[0] in _PARSED else ast.parse(source)
        return [*_docstrings(tree), *_joined(_python_comments(source))]
    return list(_joined(_marked_comments(source, MARKERS[path.suffix])))


def _paragraphs(text: str) -> Iterator[str]:
    lines, in_section = list[str](), False
    for line in text.splitlines():
        stripped = line.strip()
        is_section = _SECTION.match(stripped) is not None
        if is_section or not stripped or _ROW.match(stripped) or (in_section and _ITEM.match(stripped)):
            yield " ".join(lines)
            lines = []
        in_section = is_section or (in_section and bool(stripped))
        if stripped:
            lines.append(stripped)
    yield " ".join(lines)


def sentences(text: str) -> Iterator[str]:
    """The sentences of a block's text."""
    for paragraph in _paragraphs(re.sub(r"`[^`]*`", "code", text)):
        yield from re.split(r"(?<=[.!?])\s+(?=[A-Z\d(c])", paragraph)


def words(sentence: str) -> int:
    """The number of words of a sentence."""
    return len(re.findall(r"\w\S*", sentence))
