"""The adapters that an engine has at once, and a backend over processes that come and go."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rollmesh.generators.engines.adapters import AdapterWeights
from rollmesh.generators.engines.external.served_adapters import LiveAdapter, ServedAdapters
from rollmesh.mesh.weights.adapter import factor_names

A, B = factor_names("model.layers.0.mlp.up_proj.weight")


def adapter() -> AdapterWeights:
    return AdapterWeights(dict, "base", {A: torch.ones(2, 6), B: torch.ones(8, 2)}, 0.25)


@pytest.fixture
def adapters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ServedAdapters:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return ServedAdapters(most=2)


def load(adapters: ServedAdapters, label: str) -> LiveAdapter:
    assert not adapters.is_full
    adapters.take_idle()
    return adapters.add(label, adapters.write(adapter()))


def test_a_job_keeps_the_adapter_under_which_it_began(adapters: ServedAdapters) -> None:
    assert adapters.begin_job() is None
    first = load(adapters, "1.1")
    assert adapters.begin_job() is first
    second = load(adapters, "1.2")
    assert adapters.begin_job() is second
    assert adapters.is_full
    assert adapters.take_idle() == []
    adapters.end_job(first)
    assert not adapters.is_full
    third = load(adapters, "1.3")
    assert not first.folder.exists()
    assert [one.folder.is_dir() for one in (second, third)] == [True, True]
    assert len({one.number for one in (first, second, third)}) == 3


def test_the_newest_stays_without_jobs_unless_all_are_given_up(adapters: ServedAdapters) -> None:
    newest = load(adapters, "1.1")
    assert adapters.take_idle() == []
    assert adapters.take_idle(newest=True) == [newest]


def test_files_are_those_of_peft_and_gone_at_the_end(adapters: ServedAdapters, tmp_path: Path) -> None:
    folder = adapters.write(adapter())
    config = json.loads((folder / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["use_rslora"]) == (2, 0.5, False)
    assert config["target_modules"] == ["model.layers.0.mlp.up_proj"]
    assert load_file(folder / "adapter_model.safetensors").keys() == {A, B}
    adapters.close()
    assert not list(tmp_path.iterdir())
