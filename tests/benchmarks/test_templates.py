"""The survey of chat templates says what trains, and finds what would train otherwise than it should."""

from __future__ import annotations

import pytest

from benchmarks.templates.survey import row, summary, survey
from tests import chat_templates as of


@pytest.mark.parametrize(
    ("source", "sft", "run", "parser"),
    [
        (of.CHATML, "trains", "trains", "hermes"),
        (of.NEXT_ROLE, "trains", "trains", "hermes"),
        (of.OPENS_THOUGHTS, "the last turn: trains", "trains", "no parser"),
        ("{{ messages }}", "refused: the chat template writes", "refused", ""),
    ],
)
def test_a_template_is_surveyed(source: str, sft: str, run: str, parser: str) -> None:
    found = survey("known", source)
    assert found.sft.startswith(sft)
    assert found.run.startswith(run)
    assert found.parser == parser
    assert row(found)[0] == "`known`"
    assert summary([found])["templates"] == 1
