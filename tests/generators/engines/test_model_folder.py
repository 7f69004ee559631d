"""End tokens of a model folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import PreTrainedConfig

from rollmesh.generators.engines.model_folder import eos_ids
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
    found = eos_ids(tmp_path, PreTrainedConfig(), tokenizer)
    assert set(tokenizer.convert_ids_to_tokens(found)) == ends
    # Declared ones stay.
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2]}))
    assert set(eos_ids(tmp_path, PreTrainedConfig(), tokenizer)) >= {1, 2}
