"""The adapters that an engine has at once, and their files."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rollmesh.generators.engines.adapters import AdapterWeights
from rollmesh.generators.engines.external.adapter_folders import AdapterFolders
from rollmesh.generators.engines.external.served_adapters import LiveAdapter, ServedAdapters
from rollmesh.mesh.errors import WeightsError
from rollmesh.mesh.weights.adapter import factor_names

A, B = factor_names("model.layers.0.mlp.up_proj.weight")


class Form:
    """Something that is given back."""

    def __init__(self, _: AdapterWeights) -> None:
        self.given_back = False

    def discard(self) -> None:
        self.given_back = True


def adapter(base: str = "base") -> AdapterWeights:
    return AdapterWeights(dict, base, {A: torch.ones(2, 6), B: torch.ones(8, 2)}, 0.25)


class Engine:
    """An engine that records the labels of all loads, in order."""

    def __init__(self) -> None:
        self.adapters = ServedAdapters(most=2)
        self.loaded: list[Any] = []
        self.refuses = False

    def load(self, label: str, base: str = "base") -> LiveAdapter:
        """Loads an adapter, as an engine does at a swap."""
        assert not self.adapters.is_full
        self.adapters.take_idle()
        staged = self.adapters.stage(adapter(base), form=Form, stage_base=lambda _: base)
        asyncio.run(
            self.adapters.install(
                staged, label, stage_base=lambda _: base, load_base=self._load, load=self._load_adapter
            )
        )
        assert self.adapters.newest is not None
        return self.adapters.newest

    async def _load(self, base: Any) -> None:
        self.loaded.append(base)

    async def _load_adapter(self, live: LiveAdapter) -> None:
        if self.refuses:
            raise WeightsError("not this one")
        self.loaded.append(live.label)


@pytest.fixture
def engine() -> Engine:
    return Engine()


def test_a_job_keeps_the_adapter_under_which_it_began(engine: Engine) -> None:
    adapters = engine.adapters
    assert adapters.begin_job() is None
    first = engine.load("1.1")
    assert adapters.begin_job() is first
    second = engine.load("1.2")
    assert adapters.begin_job() is second
    assert adapters.is_full
    assert adapters.take_idle() == []
    adapters.end_job(first)
    assert not adapters.is_full
    third = engine.load("1.3")
    assert [one.form.given_back for one in (first, second, third)] == [True, False, False]
    assert len({one.name for one in (first, second, third)}) == 3


def test_the_newest_stays_without_jobs_unless_all_are_given_up(engine: Engine) -> None:
    newest = engine.load("1.1")
    assert engine.adapters.take_idle() == []
    assert engine.adapters.take_all() == [newest]
    assert engine.adapters.newest is None


def test_the_base_comes_once_and_again_where_it_was_lost_or_is_another(engine: Engine) -> None:
    engine.load("1.1")
    engine.load("1.2")
    engine.adapters.take_all()
    engine.load("1.3")
    engine.load("1.4", base="other")
    assert engine.loaded == ["base", "1.1", "1.2", "base", "1.3", "other", "1.4"]


def test_a_base_that_was_lost_after_staging_comes_again(engine: Engine) -> None:
    engine.load("1.1")
    staged = engine.adapters.stage(adapter(), form=Form, stage_base=lambda _: "base")
    assert staged.base is None
    engine.adapters.take_all()
    asyncio.run(
        engine.adapters.install(
            staged, "1.2", stage_base=lambda _: "base", load_base=engine._load, load=engine._load_adapter
        )
    )
    assert engine.loaded == ["base", "1.1", "base", "1.2"]


def test_an_adapter_that_is_refused_leaves_the_former_the_newest(engine: Engine) -> None:
    first = engine.load("1.1")
    engine.refuses = True
    with pytest.raises(WeightsError):
        engine.load("1.2")
    assert engine.adapters.newest is first


def test_files_are_those_of_peft_and_gone_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folders = AdapterFolders()
    folder, other = folders.write(adapter()), folders.write(adapter())
    config = json.loads((folder.path / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["use_rslora"]) == (2, 0.5, False)
    assert config["target_modules"] == ["model.layers.0.mlp.up_proj"]
    assert load_file(folder.path / "adapter_model.safetensors").keys() == {A, B}
    other.discard()
    assert (folder.path.exists(), other.path.exists()) == (True, False)
    folders.close()
    assert not list(tmp_path.iterdir())
