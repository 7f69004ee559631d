"""The benchmark model's lengths follow the law that its workload states."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.reward_functions import letter_order
from benchmarks.workloads import EOS, LONG_TAIL, WORKLOADS, Mode, build_model, build_tokenizer, mesh_config, prepare
from rollmesh.mesh.config import load_config


def _end_probability(prompt: str, modes: tuple[Mode, ...]) -> float:
    """Mean probability of the end token over a sampled continuation of `prompt`."""
    workload = replace(LONG_TAIL, modes=modes, max_tokens=32)
    tokenizer = build_tokenizer()
    model = build_model(workload, tokenizer)
    end = tokenizer.convert_tokens_to_ids(EOS)
    ids = tokenizer([prompt] * 16, return_tensors="pt")["input_ids"]
    torch.manual_seed(0)
    probabilities = []
    with torch.inference_mode():
        for _ in range(24):
            logits = model(ids).logits[:, -1]
            probabilities.append(logits.softmax(-1)[:, end])
            logits[:, end] = -torch.inf
            ids = torch.cat([ids, torch.multinomial(logits.softmax(-1), 1)], 1)
    return float(torch.stack(probabilities).mean())


@pytest.mark.parametrize(("prompt", "mean"), [("say c:", 16.0), ("say s>", 192.0)])
def test_modes_end_with_their_own_probability(prompt: str, mean: float) -> None:
    assert _end_probability(prompt, LONG_TAIL.modes) == pytest.approx(1 / mean, rel=0.15)


def test_a_fixed_workload_never_ends() -> None:
    assert _end_probability("say c:", (Mode(1.0, None),)) < 1e-9


def test_prepare_writes_what_both_systems_load(tmp_path: Path) -> None:
    model, data = prepare(LONG_TAIL, tmp_path, rows=200)
    rows = [json.loads(line) for line in data.read_text(encoding="utf-8").splitlines()]
    assert {"data_source", "prompt", "ability", "reward_model", "extra_info"} == rows[0].keys()
    assert 0.1 < sum(row["extra_info"]["mode"] for row in rows) / len(rows) < 0.3
    tokenizer = AutoTokenizer.from_pretrained(model)
    assert len(tokenizer("say c:")["input_ids"]) == len("say c:")
    assert tokenizer.decode(tokenizer("say c:")["input_ids"], skip_special_tokens=True) == "say c:"
    assert AutoModelForCausalLM.from_pretrained(model).num_parameters() == 127_360


@pytest.mark.parametrize("name", WORKLOADS)
def test_configurations_are_valid(name: str, tmp_path: Path) -> None:
    config = load_config(mesh_config(WORKLOADS[name], tmp_path / "m", tmp_path / "d", tmp_path / "run", steps=3))
    assert config.learner.batch.groups * config.rollout.n == WORKLOADS[name].samples


def test_reward_is_the_share_of_letters_up_to_the_wanted_one() -> None:
    assert letter_order("", "aazz", "b", None) == 0.5
    assert letter_order("", "", "b", None) == 0.0
