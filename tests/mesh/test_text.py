"""Texts of other programs: what is left of them when they are sent and shown."""

from __future__ import annotations

import pytest

from rollmesh.mesh.errors import PayloadError
from rollmesh.mesh.request_fields import check_id
from rollmesh.mesh.text import bounded, is_showable


@pytest.mark.parametrize(
    "text", ["", "plain", "two\nrows\tof it", "日本 é", "a\x1b[2Jb", "\x9b31m", "\r\x00", "\udcff"]
)
def test_a_bounded_text_can_be_sent_and_is_no_command_for_a_terminal(text: str) -> None:
    left = bounded(text, 100)
    assert left.encode().decode() == left
    assert is_showable(left)
    assert left == text or not is_showable(text) or "\udcff" in text
    assert len(left) == len(text)


@pytest.mark.parametrize("name", ["g\x1b[2J", "g\x07", "g\n", "g\u202e", "learner", "", "a b", "a:b"])
def test_names_that_no_list_or_terminal_can_hold_are_refused(name: str) -> None:
    with pytest.raises(PayloadError, match="not a name"):
        check_id("member_id", name)
