"""Text that a stream holds back comes so that clients find the thoughts in it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rollmesh.generators.openai_server.requests import parse
from rollmesh.generators.openai_server.response_format import ResponseFormatter
from rollmesh.mesh.chat.thoughts import pieces_at_marks

TOOL = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("", []),
        ("No thoughts.", ["No thoughts."]),
        ("<think>\nLook.\n</think>\n\nDone.", ["<think>", "\nLook.\n", "</think>", "\n\nDone."]),
        ("Look.</think>", ["Look.", "</think>"]),
        ("[THINK]a[/THINK]b", ["[THINK]", "a", "[/THINK]", "b"]),
        ("<thinking> <think", ["<thinking> <think"]),
    ],
)
def test_each_mark_is_a_piece(text: str, pieces: list[str]) -> None:
    assert pieces_at_marks(text) == pieces
    body = {"model": "m", "messages": [{"role": "user", "content": "?"}], "tools": [TOOL], "stream": True}
    formatter = ResponseFormatter(parse("chat", body, training=False), str, "m")
    calls = [{"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    sampled: Any = SimpleNamespace(sampled=SimpleNamespace(versions=SimpleNamespace(newest="1:0")))
    answer: Any = SimpleNamespace(
        choice=0, text=text, message={"content": text, "tool_calls": calls}, finish_reason="tool_calls", result=sampled
    )
    deltas = [chunk["choices"][0]["delta"] for chunk in formatter.end_chunks(answer, SimpleNamespace())]
    assert [delta["content"] for delta in deltas if delta.get("content")] == pieces
    assert ["tool_calls" in delta for delta in deltas][-2:] == [True, False], "calls come after the text"
