"""A reward model's folder as a reward function."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification, Qwen3Config

from examples.demo.model import build_tokenizer
from rollmesh.mesh.access.code_permissions import requested_code
from rollmesh.mesh.config import load_config
from rollmesh.mesh.config.scorers.parts import part_names
from rollmesh.mesh.errors import RewardError
from rollmesh.reward_service.loading import is_path, load_function
from rollmesh.reward_service.outcomes import Failed, RewardItem, Scored

_CONTEXT = 12


def write_model(folder: Path, labels: int = 1, padding: str | None = "<pad>") -> Path:
    tokenizer = build_tokenizer()
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=_CONTEXT,
        num_labels=labels,
        pad_token_id=None if padding is None else tokenizer.convert_tokens_to_ids(padding),
        initializer_range=1.0,
    )
    torch.manual_seed(0)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_a_group_is_scored_at_once_as_each_alone(tmp_path: Path) -> None:
    scorer = load_function(f"model:{write_model(tmp_path / 'model')}")
    assert scorer.whole_group
    items = [RewardItem(str(n), "g", "s", "1+1=", "2" * n) for n in (1, 3, 2, 9)]
    together = scorer.score(items)
    scores = [outcome.total for outcome in together if isinstance(outcome, Scored)]
    alone = [scorer.score([item])[0] for item in items[:3]]
    assert scores == pytest.approx([outcome.total for outcome in alone if isinstance(outcome, Scored)], abs=1e-5)
    assert len(set(scores)) == 3
    assert isinstance(together[3], Failed)
    assert (together[3].code, together[3].retryable) == ("too_long", False)


@pytest.mark.parametrize("padding", [None, "1", "<end>"])
def test_a_model_sees_all_tokens_whatever_pads(padding: str | None, tmp_path: Path) -> None:
    """A tokenizer without a padding token pads with one that prompts may hold."""
    folder = write_model(tmp_path / "model", padding=padding)
    scorer = load_function(f"model:{folder}")
    found = scorer.score([RewardItem(str(n), "g", "s", "1+1=", "2" * n) for n in (1, 3)])
    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(folder), build_tokenizer()
    # A classifier reads its score before an end that is padding to it.
    for response, outcome in zip(("2", "222"), found, strict=True):
        with torch.inference_mode():
            score = model(torch.tensor([tokenizer.encode(f"1+1={response}<end>")])).logits.item()
        assert isinstance(outcome, Scored)
        assert outcome.total == pytest.approx(score, abs=1e-5)


def test_folders_that_are_no_reward_model_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RewardError, match="does not exist"):
        load_function(f"model:{tmp_path / 'absent'}")
    with pytest.raises(RewardError, match="has 3 labels"):
        load_function(f"model:{write_model(tmp_path / 'three', labels=3)}")
    left = write_model(tmp_path / "run" / "hf" / "last")
    with pytest.raises(RewardError, match="is the folder of a run") as refused:
        load_function(f"model:{tmp_path / 'run'}")
    assert f"use model:{left}" in str(refused.value)
    (left / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    with pytest.raises(RewardError, match="is a LlamaForCausalLM, and no sequence classifier"):
        load_function(f"model:{left}")


def test_it_runs_in_worker_processes_and_a_generator_asks_before_it_reads_the_folder() -> None:
    spec = "model:/some/folder"
    assert is_path(spec)
    assert part_names([spec]) == ["reward_model"]
    given = {"model": {"path": "m"}, "data": {"train": "t"}, "reward": {"functions": [spec], "in_process": True}}
    assert [asked.name for asked in requested_code(load_config(given))] == [spec]
