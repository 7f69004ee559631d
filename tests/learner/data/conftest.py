"""A real fast tokenizer over characters, made in memory, and dataset files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rollmesh.learner.data.dataset import open_source
from rollmesh.learner.data.records import RowSource
from rollmesh.learner.data.rows import Row
from rollmesh.mesh.config.inputs import DataSource

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<a>{% if think %}t{% endif %}{% endif %}"
)


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {character: index for index, character in enumerate("?0123456789+=<>abcdefghijklmnopqrstuvwxyz ")}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="?", chat_template=TEMPLATE)


def record(index: int, **changes: Any) -> dict[str, Any]:
    row = {
        "data_source": "addition",
        "prompt": f"{index}+1=",
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(index + 1)},
        "extra_info": {"index": index},
    }
    row.update(changes)
    return {key: value for key, value in row.items() if value is not ...}


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def open_file(path: Path, prompt_key: str = "prompt", **settings: Any) -> RowSource[Row]:
    """The rows of a file, as of a source with these settings."""
    return open_source(DataSource(path=str(path), **settings), prompt_key)
