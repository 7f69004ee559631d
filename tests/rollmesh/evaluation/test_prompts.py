"""Prompts of a user's become a file of data."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rollmesh.evaluation.prompts import parse_prompts, read_prompts, write_prompts
from rollmesh.learner.data.dataset import open_source
from rollmesh.mesh.config.inputs import DataSource
from rollmesh.mesh.errors import DataError


def test_texts_and_messages_become_rows(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "hi"}]
    path = write_prompts(["a\nb", messages], tmp_path / "out", chat=False)
    assert [row.prompt for row in open_source(DataSource(path=str(path))).rows([0, 1])] == ["a\nb", messages]
    chat = write_prompts(["a\nb", messages], tmp_path / "out", chat=True)
    assert [row.prompt for row in open_source(DataSource(path=str(chat))).rows([0, 1])] == [
        [{"role": "user", "content": "a\nb"}],
        messages,
    ]
    assert chat != path
    assert write_prompts(["a\nb", messages], tmp_path / "out", chat=False) == path
    with pytest.raises(DataError, match="there are no prompts"):
        write_prompts([], tmp_path, chat=False)


def test_files_are_read_by_their_form(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text('one\n\n"two"\n')
    (tmp_path / "p.jsonl").write_text('"one"\n\n{"prompt": "two", "other": 1}\n{"prompt": [{"role": "user"}]}\n')
    assert read_prompts(tmp_path / "p.txt", "prompt") == ["one", '"two"']
    assert read_prompts(tmp_path / "p.jsonl", "prompt") == ["one", "two", [{"role": "user"}]]
    with pytest.raises(DataError, match="cannot be read"):
        read_prompts(tmp_path / "none.txt", "prompt")


@pytest.mark.parametrize("end", ["\u2028", "\u2029", "\x85", "\x0b", "\x1c"])
def test_ends_of_lines_within_a_text_end_no_line(tmp_path: Path, end: str) -> None:
    (tmp_path / "p.txt").write_text(f"one{end}more\ntwo\n", encoding="utf-8")
    assert read_prompts(tmp_path / "p.txt", "prompt") == [f"one{end}more", "two"]
    escaped = json.dumps(f"one{end}more", ensure_ascii=False)
    assert parse_prompts(f'{escaped}\n"two"\n', "stdin", "prompt") == [f"one{end}more", "two"]


@pytest.mark.parametrize("line", ["{}", "one", "3", '{"prompt": 3}'])
def test_lines_without_a_prompt_are_named(line: str) -> None:
    with pytest.raises(DataError, match="stdin, line 2"):
        parse_prompts(f'"fine"\n{line}\n', "stdin", "prompt")
