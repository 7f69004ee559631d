"""A model's folder is looked at file by file, and what is wrong with it is said by name."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from rollmesh.learner.model_files.checks import check_context, check_model_files, declared_context
from rollmesh.mesh.errors import ConfigError, DataError

INDEX = "model.safetensors.index.json"
# Deeper than the parser of JSON goes.
NESTED = "[" * 100_000


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Two shards and a tokenizer."""
    (tmp_path / "config.json").write_text('{"vocab_size": 8}')
    (tmp_path / "tokenizer.json").write_text("{}")
    names = [f"model-{index}.safetensors" for index in (1, 2)]
    for name in names:
        save_file({name: np.zeros(8, np.float32)}, tmp_path / name, {"format": "pt"})
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {name: name for name in names}}))
    return tmp_path


def configure(model: Path, **sizes: object) -> None:
    (model / "config.json").write_text(json.dumps({"vocab_size": 8, **sizes}))


def index(model: Path, file: object) -> None:
    (model / INDEX).write_text(json.dumps({"weight_map": {"a": file}}))


def write_header(model: Path, header: str) -> None:
    (model / "model-1.safetensors").write_bytes(len(header).to_bytes(8, "little") + header.encode())


def cut(path: Path, size: int) -> None:
    os.truncate(path, size)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda model: (model / "config.json").unlink(), "has no config.json"),
        (lambda model: cut(model / "config.json", 1), "config.json is not valid JSON"),
        (lambda model: (model / "config.json").write_text("[]"), "config.json holds no object"),
        (lambda model: (model / "config.json").write_text(NESTED), "config.json is not valid JSON"),
        (lambda model: configure(model, hidden_size="64"), 'config.json says hidden_size: "64", and should have'),
        (lambda model: configure(model, text_config={"n_layer": -1}), "config.json says n_layer: -1, and should"),
        (
            lambda model: configure(model, num_attention_heads=7, num_key_value_heads=2),
            "num_attention_heads: 7, which num_key_value_heads: 2 does not divide",
        ),
        (lambda model: cut(model / "model-2.safetensors", 5), "model-2.safetensors is cut off .* no readable header"),
        (lambda model: cut(model / "model-2.safetensors", 40), "model-2.safetensors is cut off .* no readable header"),
        (
            lambda model: cut(model / "model-2.safetensors", (model / "model-2.safetensors").stat().st_size - 1),
            r"model-2.safetensors is cut off or damaged: \d+ bytes of \d+",
        ),
        (lambda model: (model / "model-1.safetensors").unlink(), f"lacks model-1.safetensors, which {INDEX} names"),
        (lambda model: (model / INDEX).write_text("{}"), f"{INDEX} cannot be read"),
        (lambda model: (model / INDEX).write_text(NESTED), f"{INDEX} cannot be read"),
        (lambda model: index(model, 1), f"{INDEX} cannot be read"),
        (lambda model: index(model, "../x.safetensors"), f"{INDEX} names '../x.safetensors', a file outside of"),
        (lambda model: index(model, "a/../../x"), f"{INDEX} names 'a/../../x', a file outside of"),
        (lambda model: index(model, str(model / "model-1.safetensors")), f"{INDEX} names '/.*', a file outside of"),
        (lambda model: write_header(model, NESTED), "model-1.safetensors is cut off or damaged: .* no readable header"),
        (
            lambda model: write_header(model, '{"a": {"data_offsets": [0, Infinity]}}'),
            "model-1.safetensors is cut off or damaged: .* no readable header",
        ),
        (
            lambda model: (model / "model-1.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n"),
            "is a pointer of Git LFS",
        ),
        (lambda model: (model / "tokenizer.json").unlink(), "has no tokenizer"),
        (lambda model: (model / "tokenizer.json").write_text('{"model": {"vocab": {"a": 8}}}'), r"'a' \(8\)"),
        (lambda model: (model / "tokenizer.json").write_text(NESTED), "tokenizer.json cannot be read"),
        (lambda model: [path.unlink() for path in model.glob("model*")], "has no weights"),
    ],
)
def test_what_is_wrong_is_named_with_its_key(model: Path, damage: Callable[[Path], object], message: str) -> None:
    check_model_files(model, "model.path", tokenizer=True)
    damage(model)
    with pytest.raises(DataError, match=f"^model.path: .*{message}"):
        check_model_files(model, "model.path", tokenizer=True)


@pytest.mark.parametrize("name", ["config.json", "model-1.safetensors", INDEX, "tokenizer.json"])
def test_a_pipe_is_named_and_not_waited_for(model: Path, name: str) -> None:
    (model / name).unlink()
    os.mkfifo(model / name)
    with pytest.raises(DataError, match=f"{name} is a pipe"):
        check_model_files(model, "model.path", tokenizer=True)


def test_a_role_needs_no_tokenizer(model: Path) -> None:
    (model / "tokenizer.json").unlink()
    check_model_files(model, "learner.roles.critic.path", tokenizer=False)


def test_the_context_of_the_text_model_counts() -> None:
    context = declared_context({"max_position_embeddings": 9, "text_config": {"max_position_embeddings": 4}})
    assert context == 4
    assert declared_context({"n_positions": 7}) == 7
    check_context(context, 4)
    check_context(declared_context({"text_config": None}), 1 << 30)
    with pytest.raises(ConfigError, match="longest sequence that the model takes has 4 tokens"):
        check_context(context, 5)
