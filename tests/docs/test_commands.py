"""Commands that the documentation shows exist, and take the options and settings that it gives them.

They are parsed, not run: placeholders stand for files, addresses and numbers.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest
import typer.main
from typer.core import TyperGroup

from rollmesh.cli.app import app
from rollmesh.mesh.config import Config
from rollmesh.mesh.config.load import parse_overrides
from rollmesh.mesh.config.trainers.configs import CONFIGS
from tests.docs.test_docs import GUIDES, _name

ROOT = typer.main.get_command(app)
_BLOCKS = re.compile(r"^ *```(?:sh|bash|console)?\n(.*?)^ *```", re.DOTALL | re.MULTILINE)
_OPERATORS = {"&&", "||", "|", ";", "&", ">", ">>", "<"}


def _lines(text: str) -> Iterator[str]:
    for block in _BLOCKS.findall(text):
        yield from block.replace("\\\n", " ").splitlines()
    yield from re.findall(r"`(rollmesh [a-z][^`\n]*)`", text)


def _commands(text: str) -> Iterator[list[str]]:
    """The arguments of each call of `rollmesh`, without those of other programs in the same line."""
    for line in _lines(text):
        lexer = shlex.shlex(line, posix=True, punctuation_chars="();<>|&")
        lexer.whitespace_split = True
        try:
            words = list(lexer)
        except ValueError:
            continue  # An unmatched quote: output of a program.
        for at, word in enumerate(words):
            begins = at == 0 or words[at - 1] in _OPERATORS or "=" in words[at - 1]
            if begins and Path(word).name == "rollmesh":
                rest = words[at + 1 :]
                ends = [index for index, each in enumerate(rest) if each in _OPERATORS]
                yield rest[: min(ends, default=len(rest))]


def _is_placeholder(word: str) -> bool:
    return "..." in word or word.startswith(("[", "<", "$"))


def _parsed(arguments: list[str]) -> tuple[bool, list[str]]:
    """True where the command takes settings; and the options that it does not know."""
    command, context = ROOT, typer.Context(ROOT, info_name="rollmesh")
    # An option that is only named gets a value: flags leave it over.
    rest = ["x" if _is_placeholder(word) else word for word in arguments] + ["x"]
    while isinstance(command, TyperGroup) and len(rest) > 1 and not rest[0].startswith("-"):
        name, found, rest = command.resolve_command(context, rest)
        assert found is not None
        context = typer.Context(found, info_name=name, parent=context, **found.context_settings)
        command = found
    given = command.make_parser(context).parse_args(list(rest))[1]
    return context.ignore_unknown_options, [word for word in given if word.startswith("-")]


def _check_setting(setting: str, trainer: str) -> None:
    """The keys of an override lead through sections to a field."""
    section: object = CONFIGS.get(trainer, Config)
    [key] = parse_overrides([setting])
    for part in key.split("."):
        fields = getattr(section, "model_fields", None)
        if fields is None:
            return  # Names of a dictionary.
        assert part in fields, f"{setting}: no key {part}"
        section = fields[part].annotation


SHOWN = [
    pytest.param(arguments, id=f"{_name(page)}-{' '.join(arguments)[:60]}")
    for page in GUIDES
    for arguments in _commands(page.read_text())
    if arguments
]


@pytest.mark.parametrize("arguments", SHOWN)
def test_a_command_is_taken(arguments: list[str]) -> None:
    takes_settings, unknown = _parsed(arguments)
    assert takes_settings or unknown == []
    for word in unknown:
        assert word.startswith("--"), word
        if "=" in word:
            _check_setting(word, arguments[0])


def test_pages_show_commands() -> None:
    assert len(SHOWN) > 100


def _python_blocks() -> list[object]:
    return [
        pytest.param(block, id=f"{_name(page)}-{index}")
        for page in GUIDES
        for index, block in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL))
    ]


@pytest.mark.parametrize("block", _python_blocks())
def test_python_is_python(block: str) -> None:
    compile(dedent(block), "example", "exec")
