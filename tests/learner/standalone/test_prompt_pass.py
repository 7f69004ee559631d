"""A pass over prompts against a real buffer, answered by a script in place of a generator."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

import rollmesh.learner.standalone.prompt_pass as module
from rollmesh.buffer.client.client import BufferClient
from rollmesh.learner.data.dataset import open_source
from rollmesh.learner.data.prompts import PromptEncoder, TaskShape
from rollmesh.learner.standalone.prompt_pass import PassRules, PromptPass
from rollmesh.learner.standalone.response_file import ResponseFile, read_responses
from rollmesh.mesh.config.inputs import DataSource
from rollmesh.mesh.errors import StalledError
from tests.learner.data.conftest import record, write_jsonl
from tests.learner.live.eval_mesh import V0, mesh

_LONG = "1" * 40


def make_pass(
    client: BufferClient, folder: Path, tokenizer: Any, file: ResponseFile, rows: int, **rules: Any
) -> PromptPass:
    prompts = [record(index) for index in range(rows)]
    prompts[1]["prompt"] = _LONG
    source = open_source(DataSource(path=str(write_jsonl(folder / "prompts.jsonl", prompts))))
    encoder = PromptEncoder(tokenizer, max_prompt_tokens=16, template_kwargs={})
    given = PassRules(V0, TaskShape(n=2, temperature=1.0, max_tokens=2), **{"stall_limit_s": 20.0, **rules})
    wanted = [row for row in range(rows) if row not in file.rows]
    return PromptPass(client, source, wanted, encoder, lambda ids: " ".join(map(str, ids)), file, given)


async def test_every_prompt_is_asked_once_however_few_are_seeded_at_a_time(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_AHEAD", 2)
    monkeypatch.setattr(module, "_LOOK_S", 0.05)
    path = tmp_path / "responses.jsonl"
    async with mesh(tmp_path) as found:
        with ResponseFile(path) as file:
            asking = asyncio.create_task(make_pass(found.client, tmp_path, tokenizer, file, 7).run())
            await found.answer(V0, 6)
            await asyncio.wait_for(asking, 120)
        ledger = await found.client.ledger("eval")
    records = sorted(read_responses(path), key=lambda one: int(one["row"]))
    assert [one["row"] for one in records] == list(range(7))
    assert records[1] == {"row": 1, "refused": "long_prompt", "prompt_tokens": 40, "responses": []}
    assert records[3]["prompt"] == "3+1="
    assert (records[3]["ground_truth"], records[3]["prompt_tokens"]) == ("4", 4)
    assert records[3]["responses"] == [
        {"text": "1 1", "reward": 3.0, "reason": "", "tokens": 2, "finish": "stop"},
        {"text": "4 5", "reward": None, "reason": "broken", "tokens": 2, "finish": "stop"},
    ]
    assert (ledger.recounted.trained, list(ledger.discrepancies)) == (6, [])


async def test_a_second_pass_asks_what_is_missing(tmp_path: Path, tokenizer: Any) -> None:
    path = tmp_path / "responses.jsonl"
    with ResponseFile(path) as file:
        file.append({"row": row, "responses": []} for row in (0, 2))
    async with mesh(tmp_path) as found:
        with ResponseFile(path) as file:
            asking = make_pass(found.client, tmp_path, tokenizer, file, 5, with_log_probs=True)
            task = asyncio.create_task(asking.run())
            await found.answer(V0, 2)
            await asyncio.wait_for(task, 120)
    records = list(read_responses(path))
    assert sorted(one["row"] for one in records) == [0, 1, 2, 3, 4]
    assert records[-1]["responses"][0]["token_ids"] == [1, 1]
    assert records[-1]["responses"][0]["log_probs"] == [0.0, 0.0]
    assert records[-1]["responses"][1]["token_ids"] == []


async def test_a_mesh_that_answers_nothing_is_an_error_by_name(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_LOOK_S", 0.05)
    async with mesh(tmp_path) as found:
        with ResponseFile(tmp_path / "responses.jsonl") as file:
            asking = make_pass(found.client, tmp_path, tokenizer, file, 3, stall_limit_s=0.3)
            with pytest.raises(StalledError, match="no prompt was begun or answered for"):
                await asyncio.wait_for(asking.run(), 120)


async def test_a_pass_ends_where_no_prompt_can_be_asked(tmp_path: Path, tokenizer: Any) -> None:
    with ResponseFile(tmp_path / "responses.jsonl") as file:
        file.append([{"row": 0, "responses": []}])
        async with mesh(tmp_path) as found:
            await asyncio.wait_for(make_pass(found.client, tmp_path, tokenizer, file, 2).run(), 120)
        assert file.rows == {0, 1}
