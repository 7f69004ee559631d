"""Agent frameworks, unmodified, against a real endpoint, where `make agent-clients` has installed them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.agents.frameworks import (
    CLIENTS,
    FRAMEWORKS,
    HEADER,
    Case,
    Found,
    Framework,
    endpoint,
    read,
    row,
    run,
    written,
)
from tests.generators.openai_server.world import Serving
from tests.repository import REPOSITORY

PAGE = (REPOSITORY / "docs" / "endpoint.md").read_text(encoding="utf-8")
VERSIONS = dict(
    re.findall(r"^([a-z-]+)(?:\[\w+\])?==(.+)$", (REPOSITORY / "deploy/agents/clients.in").read_text(), re.M)
)
# The one whose two agents ask for most.
FIRST = "of_smolagents"


@pytest.fixture(scope="module")
def world() -> Iterator[Serving]:
    if not CLIENTS.exists():
        pytest.skip(f"agent frameworks are not installed in {CLIENTS.parents[1]}: make agent-clients")
    with endpoint() as found:
        yield found


@pytest.mark.slow
@pytest.mark.parametrize(
    "framework",
    [
        pytest.param(one, id=one.name, marks=() if one.program == FIRST else pytest.mark.exhaustive)
        for one in FRAMEWORKS
    ],
)
def test_a_framework_does_what_the_page_says(world: Serving, framework: Framework, tmp_path: Path) -> None:
    found = run(framework, world, tmp_path)
    told = {line[0]: line for line in read(PAGE)}
    shown = row(framework, found)
    assert told[shown[0]] == shown, found


def test_the_page_has_all_frameworks_with_the_versions_that_are_installed() -> None:
    rows = read(PAGE)
    assert [line[0] for line in rows] == [f"{one.name} ({one.package} {VERSIONS[one.package]})" for one in FRAMEWORKS]
    assert all(len(line) == len(HEADER) for line in rows)
    for line in rows:
        assert line[1] == "yes"
        assert re.fullmatch(r"yes|no: .+|\d+ of \d+: [a-z, ]+", line[2])
        assert all(re.fullmatch(r"yes|has none|no: .+", cell) for cell in line[3:])
    assert written(PAGE, rows) == PAGE


RIGHT, REFUSED = Case("", 3, 3, ()), Case("BadRequestError: a | b\nc", 0, 0, ())
DROPPED = Case("", 4, 1, ("another",))


@pytest.mark.parametrize(
    ("cases", "cells"),
    [
        ({"a": RIGHT, "b": RIGHT}, ("yes", "yes", "yes", "has none", "yes")),
        ({"a": RIGHT, "b": DROPPED}, ("yes", "1 of 4: another", "yes", "has none", "yes")),
        (
            {"a": RIGHT, "b": REFUSED},
            ("yes", "no: calls without an answer", "no: BadRequestError: a / b c", "has none", "yes"),
        ),
    ],
)
def test_a_row_says_what_was_found(cases: dict[str, Case], cells: tuple[str, ...]) -> None:
    framework = Framework("some", "of_some", "some", runs=("a",), tools=("b", "a"), structured=(), streaming=("a",))
    assert framework.cases == ["a", "b"]
    found = row(framework, Found("some", "some 1.0", cases))
    assert found == ("some (some 1.0)", *cells)
    page = written("before\n<!-- table of frameworks --><!-- end of the table -->\nafter", [found])
    assert read(page) == [found]
