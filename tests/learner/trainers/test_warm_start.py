"""The warm start learns, and writes a folder that loads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from rollmesh.learner.trainers.warm_start import warm_start
from rollmesh.mesh.errors import DataError
from tests.learner.engines.models import make_model

torch.set_num_threads(1)


def write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models

    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


def test_warm_start_learns_and_saves(tmp_path):
    folder = make_model(tmp_path / "model", "qwen3")
    write_tokenizer(folder)
    pairs = [([a, 20], [a + 20, 2]) for a in range(3, 19)]
    losses = warm_start(folder, pairs, steps=60, lr=1e-2, batch=16, out_folder=tmp_path / "out")
    assert len(losses) == 60
    assert losses[-1] < 0.2 < 1.0 < losses[0]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    answer = model(torch.tensor([[5, 20]])).logits[0, -1].argmax()
    assert answer == 25
    assert AutoTokenizer.from_pretrained(tmp_path / "out").vocab_size == 2


@pytest.mark.parametrize("pairs", [[], [([1], [])], [([], [1])]])
def test_empty_data_is_named(tmp_path, pairs):
    with pytest.raises(DataError, match=r"pair"):
        warm_start(tmp_path, pairs, steps=1, lr=1e-3, batch=1, out_folder=tmp_path / "out")
