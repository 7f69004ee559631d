"""The tables of docs/endpoint.md name fields, reasons and limits that the endpoint has."""

from __future__ import annotations

import re

from rollmesh.generators.openai_server import endpoint, request_bodies, requests
from rollmesh.generators.openai_server.conversations import sessions
from rollmesh.generators.openai_server.requests import ChatRequest, TextRequest
from rollmesh.mesh.trajectory.branches import Cause
from tests.repository import REPOSITORY

PAGE = (REPOSITORY / "docs" / "endpoint.md").read_text()


def rows(header: str) -> list[list[str]]:
    """The cells of the table whose header begins so."""
    lines = PAGE.partition(f"\n{header}")[2].partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]


def test_fields_exist() -> None:
    # Values of fields stand in parentheses.
    cells = [re.sub(r"\([^()]*\)", "", re.sub(r"\[.*?\]\(.*?\)", "", row[0])) for row in rows("| field |")]
    named = {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}
    assert len(named) > 40
    assert named <= {*ChatRequest.model_fields, *TextRequest.model_fields}


def test_every_reason_for_a_branch_has_its_remedy() -> None:
    found = {row[1].strip("`"): row[0] for row in rows("| reason |")}
    assert found == {cause.value: cause.text for cause in Cause}


def test_limits_are_those_of_the_code() -> None:
    limits = {row[0]: row[1] for row in rows("| what | at most |")}
    assert f"{request_bodies._OTHER_BYTES >> 20} MiB and {request_bodies._TOKEN_BYTES} bytes" in limits["a body"]
    assert f"{request_bodies._OTHER_VALUES:,} JSON values and {request_bodies._TOKEN_VALUES} per" in limits["a body"]
    held = f"{request_bodies._HELD_LARGEST} of the largest size; {request_bodies._HELD:,}"
    assert limits["bodies being read"] == held
    assert f"{sessions._SESSION_TOKENS >> 20} Mi recorded tokens" in limits["a session"]
    assert f"{sessions._LONGEST_CONVERSATIONS} contexts" in limits["a session"]
    assert f"{sessions._ALL_TOKENS >> 20} Mi recorded tokens" in limits["sessions of your own"]
    assert f"`stop` (up to {requests._MOST_STOPS})" in PAGE
    assert endpoint._AHEAD == 4
    assert "over four times `rollout.slots` answers at once" in PAGE
