"""The recipes: read, planned on the devices that they name, and run dry here."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from rollmesh.launcher.preflight.dry_run import dry_run
from rollmesh.mesh.config import load_config
from rollmesh.mesh.config.models import Config
from rollmesh.planning.cluster import GIB
from rollmesh.planning.plan import Plan
from tests.learner.live.tiny import make_data, make_model
from tests.repository import REPOSITORY
from tests.rollmesh.planning.plans import ARCHITECTURES, planned

RECIPES = sorted((REPOSITORY / "examples" / "recipes").glob("*.yaml"))
# As the plan assumes them for such devices: a machine that has some would be asked instead.
HOSTS = {"1x4090-24G": "128G", "1xH100-80G": "200G", "8xH100-80G": "1600G"}


def header(recipe: Path, name: str) -> str:
    """The rest of a row of a recipe's comment."""
    found = re.search(rf"^# {name}: +(.+)$", recipe.read_text(), re.MULTILINE)
    assert found, f"{recipe.name} has no row {name}"
    return found[1]


def architecture(config: Config) -> str:
    """The folder with the sizes of a recipe's model, which stands in the recipe by its hub id."""
    name = config.model.path.split("/")[1].lower().removesuffix("-instruct")
    return str(ARCHITECTURES / name)


def described(plan: Plan) -> str:
    """The numbers of a plan as recipes have them."""
    assert plan.generator is not None
    on_host = next(use for use in plan.hosts if use.name == "host of the learner")
    return (
        f"learner {plan.learner_peak / GIB:.1f} GiB per rank, generator {plan.generator.total / GIB:.1f} GiB per "
        f"device, host of the learner {on_host.needed / GIB:.0f} GiB"
    )


def test_every_recipe_says_what_it_needs_and_how_it_starts() -> None:
    assert {path.stem for path in RECIPES} == {
        "qwen2.5-0.5b-one-gpu",
        "qwen2.5-7b-eight-gpus",
        "qwen2.5-7b-lora-one-gpu",
        "qwen3-30b-a3b-two-nodes",
    }
    page = (REPOSITORY / "docs" / "recipes.md").read_text()
    for recipe in RECIPES:
        name = str(recipe.relative_to(REPOSITORY))
        assert name in header(recipe, "Start")
        assert name in header(recipe, "Check")
        command = header(recipe, "Data")
        assert command.startswith("rollmesh data prepare ")
        (folder,) = re.findall(r" --out (\S+)", recipe.read_text())
        data = load_config(recipe).data
        assert data.train[0].path == f"{folder}/train.parquet"
        assert data.eval is not None
        assert data.eval[0].path == f"{folder}/eval.parquet"
        assert "never run on this hardware" in recipe.read_text()
        assert f"](../{name})" in page


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_fits_the_devices_that_it_names(recipe: Path) -> None:
    name = re.escape(str(recipe.relative_to(REPOSITORY)))
    command = re.fullmatch(rf"rollmesh plan {name} --devices (\S+)(?: --nodes (\d+))?", header(recipe, "Plan"))
    assert command
    devices, nodes = command[1], int(command[2] or 1)
    sized = load_config(recipe, [f"model.path={architecture(load_config(recipe))}"])
    plan = planned(sized, devices, nodes, host_memory=HOSTS[devices])
    assert plan.problems == ()
    assert header(recipe, "Expected") == described(plan)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_runs_dry(recipe: Path, tmp_path: Path) -> None:
    """With a tiny model and the engine of this machine in place of those that need a GPU."""
    changes = {
        "model.path": str(make_model(tmp_path / "model")),
        "data.train": str(make_data(tmp_path / "train.jsonl", 8)),
        "data.eval": str(make_data(tmp_path / "eval.jsonl", 8)),
        "run.dir": str(tmp_path / "runs"),
        "rollout.engine": "hf",
        "rollout.python": None,
        "rollout.max_prompt_tokens": 16,
        "rollout.max_response_tokens": 32,
        "learner.device": "cpu",
        "rollout.device": "cpu",
    }
    config = load_config(recipe, [f"{key}={json.dumps(value)}" for key, value in changes.items()])
    said = dry_run(config)
    assert said[0] == f"run {config.run.name} would start in {config.run.folder}"
    assert f"on {config.learner.ranks} rank" in "\n".join(said)
    assert "nothing was started" in said[-1]
    assert not config.run.folder.exists()
