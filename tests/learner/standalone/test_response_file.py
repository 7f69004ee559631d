"""The file of responses: whole lines, each prompt once, whatever end it had."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollmesh.learner.standalone.response_file import ResponseFile, read_responses
from rollmesh.mesh.errors import DataError


def test_a_prompt_has_one_line_and_a_broken_one_is_asked_again(tmp_path: Path) -> None:
    path = tmp_path / "responses.jsonl"
    with ResponseFile(path) as file:
        file.append([{"row": 3, "text": "a"}, {"row": 3, "text": "b"}, {"row": 1, "text": "ü"}])
    with path.open("a") as broken:
        broken.write('{"row": 7, "te')
    assert [record["row"] for record in read_responses(path)] == [3, 1]
    with ResponseFile(path) as file:
        assert file.rows == {1, 3}
        file.append([{"row": 1, "text": "c"}, {"row": 7, "text": "d"}])
    assert [(record["row"], record["text"]) for record in read_responses(path)] == [(3, "a"), (1, "ü"), (7, "d")]


def test_a_file_without_a_whole_line_is_empty(tmp_path: Path) -> None:
    path = tmp_path / "responses.jsonl"
    assert list(read_responses(path)) == []
    path.write_text("x" * (1 << 17))
    with ResponseFile(path) as file:
        assert file.rows == set()
    assert path.read_text() == ""


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "responses.jsonl"
    path.write_text('{"row": 1}\n{}\n')
    with pytest.raises(DataError, match="line 2 is damaged"):
        ResponseFile(path)
