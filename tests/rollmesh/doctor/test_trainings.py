"""A training on data is examined before it starts: its model, its rows, its hub."""

from __future__ import annotations

import json
from pathlib import Path

from examples.chats import chat_tokenizer
from examples.demo.model import write_model
from tests.command import Command


def test_what_is_wrong_with_a_training_is_found(rollmesh: Command, tmp_path: Path) -> None:
    model, rows, config = tmp_path / "model", tmp_path / "rows.jsonl", tmp_path / "dpo.yaml"
    write_model(model, 0, chat_tokenizer("0123456789+= "))
    pair = {"prompt": "1+1=", "chosen": "2", "rejected": "3"}
    rows.write_text(json.dumps(pair) + "\n")
    config.write_text(json.dumps({"model": {"path": str(model)}, "data": {"train": str(rows)}}))
    whole = rollmesh("doctor", str(config), "--for", "dpo", "--all")
    assert whole.returncode == 0, whole.stdout
    assert "1 rows can be read" in whole.stdout
    rows.write_text(json.dumps({"prompt": "1+1="}) + "\n")
    (model / "model.safetensors").unlink()
    broken = rollmesh("doctor", str(config), "--for", "dpo")
    assert broken.returncode == 1
    assert "problem  model: " in broken.stdout
    assert "problem  data: " in broken.stdout
    assert f"rollmesh data check {config} --for dpo" in broken.stdout
    assert "there is no check" in rollmesh("doctor", str(config), "--for", "dpo", "--only", "ports").stderr
    assert "no such command" in rollmesh("doctor", str(config), "--for", "ppo").stderr
