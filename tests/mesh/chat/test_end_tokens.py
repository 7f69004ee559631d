"""End tokens of a model folder: named by its files, and those with which training ends turns and texts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import PreTrainedConfig

from rollmesh.mesh.chat.end_tokens import GENERATION_FILE, end_tokens
from tests import chat_templates as of


@pytest.mark.parametrize(
    ("template", "ends"),
    [
        (of.CHATML, {"<|im_end|>"}),
        # Turns end with another token than texts.
        (of.CHATML.replace("<|im_end|>", "<|end|>"), {"<|im_end|>", "<|end|>"}),
        (of.NEXT_ROLE, {"<|im_end|>", "<|user|>", "<|tool|>"}),
        (of.NEVER, {"<|im_end|>"}),
        ("{{ messages[0].content }}", {"<|im_end|>"}),
    ],
)
def test_generation_ends_at_the_end_of_a_turn(tmp_path: Path, template: str, ends: set[str]) -> None:
    tokenizer = of.tokenizer_for(template)
    found = end_tokens(tmp_path, PreTrainedConfig(), tokenizer)
    assert set(tokenizer.convert_ids_to_tokens(found.all)) == ends
    # Declared ones stay.
    (tmp_path / GENERATION_FILE).write_text(json.dumps({"eos_token_id": [1, 2]}))
    assert set(end_tokens(tmp_path, PreTrainedConfig(), tokenizer).all) >= {1, 2}


OTHER_END = of.CHATML.replace("<|im_end|>", "<|end|>")
BY_SWITCH = "{% set end = '<|end|>' if short else '<|im_end|>' %}" + of.CHATML.replace("<|im_end|>", "{{ end }}")


@pytest.mark.parametrize(
    ("named", "config_names", "arguments", "unnamed"),
    [
        (None, "<|im_end|>", {}, {"<|end|>"}),
        (["<|im_end|>"], "<|im_end|>", {}, {"<|end|>"}),
        (["<|im_end|>", "<|end|>"], "<|im_end|>", {}, set()),
        # The file takes the place of the configuration, also where it names none.
        ([], "<|end|>", {}, {"<|im_end|>", "<|end|>"}),
        (None, None, {}, {"<|im_end|>", "<|end|>"}),
        # The tokenizer's own token ends texts.
        (["<|end|>"], None, {}, {"<|im_end|>"}),
    ],
)
def test_trained_ends_that_no_file_names_are_told(
    tmp_path: Path, named: list[str] | None, config_names: str | None, arguments: dict[str, bool], unnamed: set[str]
) -> None:
    tokenizer = of.tokenizer_for(OTHER_END)
    known = tokenizer.get_vocab()
    if named is not None:
        ids = [known[token] for token in named]
        (tmp_path / GENERATION_FILE).write_text(json.dumps({"eos_token_id": ids} if ids else {}))
    config = PreTrainedConfig(eos_token_id=None if config_names is None else known[config_names])
    found = end_tokens(tmp_path, config, tokenizer, [arguments])
    assert {tokenizer.convert_ids_to_tokens(token) for token in found.unnamed} == unnamed
    assert set(found.unnamed) <= set(found.all)
    said = found.notice(tokenizer, "model.path")
    assert (said is None) == (not unnamed)
    assert all(f"{token} ({known[token]})" in str(said) for token in unnamed)


def test_arguments_of_the_template_may_decide_the_end(tmp_path: Path) -> None:
    tokenizer = of.tokenizer_for(BY_SWITCH)
    for arguments, ends in (({}, {"<|im_end|>"}), ({"short": True}, {"<|end|>", "<|im_end|>"})):
        found = end_tokens(tmp_path, PreTrainedConfig(), tokenizer, [arguments])
        assert set(tokenizer.convert_ids_to_tokens(found.trained)) == ends
