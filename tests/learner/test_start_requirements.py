"""Settings and devices that a start needs are checked before anything is started."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rollmesh.learner.engines import registry
from rollmesh.learner.start_requirements import check_device, check_start
from rollmesh.mesh.config import load_config
from rollmesh.mesh.config.models import Config
from rollmesh.mesh.errors import ConfigError


def configured(folder: Path, *overrides: str) -> Config:
    (folder / "config.json").write_text(json.dumps({"num_attention_heads": 4}))
    settings = {"model": {"path": str(folder)}, "data": {"train": "t.jsonl"}, "learner": {"steps": 10, "ranks": 2}}
    return load_config(settings, list(overrides))


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("learner.engine=mein", "learner.engine: no engine 'mein'"),
        ("learner.roles={critic: {engine: mein}}", "learner.roles.critic.engine: no engine 'mein'"),
        ("learner.parallel.shards=3", "learner.parallel.shards: 3 does not divide"),
        ("learner.distributed={nodes: 2, rendezvous: 'HOST:29500'}", "learner.distributed.rendezvous is HOST:29500"),
        ("checkpoint.copy_to=s4://x/y", "cannot copy to s4://x/y: Protocol not known: s4"),
        ("learner.optimizer={schedule: wsd, decay_ratio: 0.9, warmup_ratio: 0.5}", "learner.optimizer: a warm-up of 5"),
        ("learner.optimizer={schedule: wsd, decay_ratio: 0.5, warmup_steps: 6}", "learner.optimizer: a warm-up of 6"),
    ],
)
def test_a_setting_that_no_start_can_have_is_refused_by_name(tmp_path: Path, override: str, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check_start(configured(tmp_path, override))
    assert refused.value.message.startswith(said)


@pytest.mark.parametrize(
    "override",
    [
        "checkpoint.copy_to=file:///somewhere",
        "checkpoint.copy_to=simplecache::memory://x",
        "learner.optimizer={schedule: wsd, decay_ratio: 0.5, warmup_ratio: 0.5}",
        "learner.optimizer={schedule: cosine, warmup_steps: 20}",
        "learner.distributed={nodes: 2, rendezvous: 'host.example:29500'}",
    ],
)
def test_others_are_not(tmp_path: Path, override: str) -> None:
    check_start(configured(tmp_path, override))


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("learner.attention=flash_attention_3", "learner.attention: flash_attention_3 needs a CUDA device"),
        ("learner.profile.memory=true", "learner.profile.memory records allocations on CUDA devices"),
    ],
)
def test_what_a_cpu_cannot_is_refused_there(tmp_path: Path, override: str, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check_device(configured(tmp_path, override), "cpu")
    assert refused.value.message.startswith(said)
    check_device(configured(tmp_path), "cpu")


@pytest.mark.parametrize("absent", ["megatron", "megatron.core"])
def test_megatron_needs_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, absent: str) -> None:
    """Other packages share its namespace."""
    config = configured(tmp_path, "learner.roles={critic: {engine: megatron}}")
    monkeypatch.setattr(registry, "find_spec", lambda name: None if name == absent else object())
    with pytest.raises(ConfigError) as refused:
        check_start(config)
    assert refused.value.message.startswith("learner.roles.critic.engine: megatron needs the package megatron-core")
    assert "rollmesh[megatron]" in str(refused.value.hint)
    monkeypatch.setattr(registry, "find_spec", lambda name: object())
    check_start(config)


def test_packages_of_another_interpreter_are_not_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = configured(tmp_path, "learner.engine=megatron")
    monkeypatch.setattr(registry, "find_spec", lambda name: None)
    check_start(config, elsewhere=True)
    with pytest.raises(ConfigError, match="needs the package megatron-core"):
        check_start(config)


def test_an_attention_kernel_of_a_role_is_checked_too(tmp_path: Path) -> None:
    config = configured(
        tmp_path,
        "learner.engine=mine",
        "learner.attention=flash_attention_3",
        "learner.roles={critic: {engine: fsdp2}}",
    )
    assert config.learner.engines == {"mine", "fsdp2"}
    with pytest.raises(ConfigError, match=r"learner\.attention: flash_attention_3 needs a CUDA device"):
        check_device(config, "cpu")
