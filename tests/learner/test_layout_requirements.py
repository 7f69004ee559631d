"""The layout of ranks is checked before anything is started."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rollmesh.learner.layout_requirements import check_layout, check_routers
from rollmesh.mesh.config import load_config
from rollmesh.mesh.config.learner import LearnerSection
from rollmesh.mesh.config.parallel import RouterSection
from rollmesh.mesh.errors import ConfigError


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["learner.parallel.shards=3"], "learner.parallel.shards: 3 does not divide the learner's 4 ranks"),
        (["learner.parallel.sp=3"], "learner.parallel.sp: 3 does not divide the learner's 4 ranks"),
        (["learner.parallel.sp=4"], "learner.parallel.sp: 4 does not divide the 6 attention heads of model"),
        (["learner.parallel={shards: 2, sp: 2}"], None),
        (["learner.parallel.shards=3", "learner.engine=mine"], None),
        (["learner.parallel={sp: 2, dp: 2}"], None),
        (["learner.parallel={sp: 2, dp: 4}"], "learner.parallel.dp: 4, and 4 ranks with sp 2 make 2 data-parallel"),
        (["learner.parallel.tp=2"], "learner.parallel.tp: 2 is for engine megatron, and this one is fsdp2"),
        (["learner.parallel.layers=[1]"], "learner.parallel.layers: (1,) is for engine megatron"),
        (
            ["learner.engine=megatron", "learner.parallel={tp: 3}"],
            "learner.parallel.tp: 3 does not divide the learner's",
        ),
        (["learner.engine=megatron", "learner.parallel={tp: 2, pp: 2}"], None),
        (
            ["learner.engine=megatron", "learner.parallel={tp: 4}"],
            "learner.parallel.tp: 4 does not divide the 6 attention",
        ),
        (["learner.engine=megatron", "learner.compile=true"], "learner.compile: true is for engine fsdp2"),
        (
            ["learner.engine=megatron", "learner.optimizer.name=muon"],
            "learner.optimizer.name: muon is for engine fsdp2",
        ),
        (
            ["learner.megatron.overlap_grad_reduce=true"],
            "learner.megatron.overlap_grad_reduce: True is for engine megatron, which no role has",
        ),
        (
            ["learner.router.load_balance_coeff=0.01"],
            "learner.router.load_balance_coeff: 0.01 is for models with experts, and",
        ),
        (
            ["learner.engine=megatron", "learner.router.z_loss_coeff=0.01"],
            "learner.router.z_loss_coeff: 0.01 is for models with experts, and",
        ),
    ],
)
def test_what_cannot_be_divided_is_refused_by_name(tmp_path: Path, overrides: list[str], said: str | None) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"num_attention_heads": 6}))
    settings = {"model": {"path": str(tmp_path)}, "data": {"train": "t.jsonl"}, "learner": {"ranks": 4}}
    config = load_config(settings, overrides)
    if said is None:
        check_layout(config)
        return
    with pytest.raises(ConfigError) as refused:
        check_layout(config)
    assert refused.value.message.startswith(said)


ROLE = "learner.roles.critic."


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["learner.parallel.sp=2", f"{ROLE}engine=megatron"], None),
        (["learner.engine=megatron", "learner.parallel={tp: 2, pp: 2}", f"{ROLE}engine=fsdp2"], None),
        (
            ["learner.engine=megatron", f"{ROLE}parallel={{tp: 4}}"],
            f"{ROLE}parallel.tp: 4 does not divide the 2 groups",
        ),
        ([f"{ROLE}parallel={{sp: 3}}"], f"{ROLE}parallel.sp: 3 does not divide the learner's 4 ranks"),
        ([f"{ROLE}parallel={{shards: 3}}"], f"{ROLE}parallel.shards: 3 does not divide the learner's 4 ranks"),
        ([f"{ROLE}parallel={{tp: 2}}"], f"{ROLE}parallel.tp: 2 is for engine megatron"),
        ([f"{ROLE}engine=megatron", f"{ROLE}parallel={{shards: 2}}"], f"{ROLE}parallel.shards: 2 is for engine fsdp2"),
        (
            ["learner.engine=megatron", "learner.parallel={tp: 4}"],
            "learner.parallel.tp: 4 does not divide the 2 groups",
        ),
        # The learner's optimizer may be that of the actor alone, which has another engine.
        (["learner.optimizer.name=muon", f"{ROLE}engine=megatron"], None),
        (
            [f"{ROLE}engine=megatron", f"{ROLE}optimizer={{state_dtype: 8bit}}"],
            f"{ROLE}optimizer.state_dtype: 8bit is for engine fsdp2",
        ),
        (["learner.attention=exact", f"{ROLE}engine=megatron"], "learner.attention: exact is for engine fsdp2"),
    ],
)
def test_each_role_is_divided_by_its_own_engine(tmp_path: Path, overrides: list[str], said: str | None) -> None:
    for name, config in (("actor", {"num_attention_heads": 8}), ("critic", {"num_key_value_heads": 2})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    settings = {
        "model": {"path": str(tmp_path / "actor")},
        "data": {"train": "t.jsonl"},
        "learner": {"ranks": 4, "roles": {"critic": {"path": str(tmp_path / "critic")}}},
    }
    config = load_config(settings, overrides)
    if said is None:
        check_layout(config)
        return
    with pytest.raises(ConfigError) as refused:
        check_layout(config)
    assert refused.value.message.startswith(said)


def test_a_hub_model_is_divided_as_far_as_ranks_can_tell() -> None:
    settings = {"model": {"path": "org/name"}, "data": {"train": "t"}, "learner": {"ranks": 4, "engine": "megatron"}}
    check_layout(load_config(settings, ["learner.parallel={tp: 2, ep: 4}"]))
    with pytest.raises(ConfigError, match="ep: 3 does not divide the 4 ranks of a stage"):
        check_layout(load_config(settings, ["learner.parallel={ep: 3}"]))


@pytest.mark.parametrize("role", ["", "roles.critic."])
def test_a_family_that_megatron_does_not_know_is_refused_by_name(tmp_path: Path, role: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "olmo2"}))
    settings = {"model": {"path": str(tmp_path)}, "data": {"train": "t"}, "learner": {"roles": {"critic": {}}}}
    check_layout(load_config(settings, []))
    with pytest.raises(ConfigError) as refused:
        check_layout(load_config(settings, [f"learner.{role}engine=megatron"]))
    assert refused.value.message.startswith(f"learner.{role}engine: megatron does not know models of model_type olmo2")


@pytest.mark.parametrize(
    ("engine", "router", "models", "said"),
    [
        ("fsdp2", {"load_balance_coeff": 0.01}, {"actor": 0, "critic": 8}, None),
        ("fsdp2", {"replay": True}, {"of a hub": None}, None),
        ("fsdp2", {}, {"actor": 0}, None),
        ("megatron", {"load_balance_coeff": 0.01}, {"actor": 8}, None),
        ("megatron", {"replay": True}, {"actor": 8}, None),
        (
            "megatron",
            {"bias_update_rate": 0.01},
            {"actor": 8},
            "bias_update_rate: 0.01 is for models that choose experts by a bias",
        ),
    ],
)
def test_settings_of_routers_are_for_models_and_engines_that_have_them(
    engine: str, router: dict[str, Any], models: dict[str, int | None], said: str | None
) -> None:
    learner = LearnerSection(engine=engine, router=RouterSection(**router))
    if said is None:
        check_routers(learner, models)
        return
    with pytest.raises(ConfigError) as refused:
        check_routers(learner, models)
    assert refused.value.message.startswith(f"learner.router.{said}")


def test_stages_of_megatron_take_no_images(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "llava", "text_config": {"num_attention_heads": 4}})
    )
    values = {"model": {"path": str(tmp_path)}, "data": {"train": "none"}, "learner": {"ranks": 2}}
    check_layout(load_config(values, ["learner.parallel.sp=2"]))
    with pytest.raises(ConfigError, match=r"megatron trains text alone: .* models of model_type llava take images"):
        check_layout(load_config(values, ["learner.engine=megatron"]))


def test_images_do_not_reach_roles_with_processes_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llava"}))
    values = {"model": {"path": str(tmp_path)}, "data": {"train": "none"}}
    check_layout(load_config(values, ["learner.roles.reference={}"]))
    with pytest.raises(ConfigError, match=r"^learner.roles.reference.at: the actor takes images"):
        check_layout(load_config(values, ["learner.roles.reference.at=own"]))


@pytest.mark.parametrize(
    ("role", "said"),
    [
        ({"model_type": "llava", "vision_config": {"patch_size": 14}}, None),
        ({"model_type": "llama"}, "it is a model of model_type llama"),
        ({"model_type": "llava", "vision_config": {"patch_size": 16}}, "it has vision_config.patch_size 16"),
    ],
    ids=["the same images", "text alone", "other patches"],
)
def test_roles_next_to_an_actor_with_images_take_the_same_images(
    tmp_path: Path, role: dict[str, Any], said: str | None
) -> None:
    actor, other = tmp_path / "actor", tmp_path / "other"
    for folder, config in ((actor, {"model_type": "llava", "vision_config": {"patch_size": 14}}), (other, role)):
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
    config = load_config(
        {"model": {"path": str(actor)}, "data": {"train": "none"}}, [f"learner.roles.critic.path={other}"]
    )
    # Without the files of a processor it is trained on text.
    check_layout(config)
    (actor / "preprocessor_config.json").write_text("{}")
    if said is None:
        check_layout(config)
        return
    with pytest.raises(ConfigError, match=rf"^learner.roles.critic.path: the actor takes images.*{said}"):
        check_layout(config)
