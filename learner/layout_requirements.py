"""Requirements of the layout of ranks: what cannot be divided is refused before anything is started."""

from __future__ import annotations

from pathlib import Path

from rollmesh.learner.engines.fsdp2.preparation.shard_mesh import check_shards
from rollmesh.learner.engines.fsdp2.ulysses.division import check_division
from rollmesh.learner.model_files.checks import attention_heads, read_model_config
from rollmesh.mesh.config.models import Config


def check_layout(config: Config) -> None:
    """Checks that ranks and attention heads can be divided as configured; models of a hub are checked later.

    Raises:
        ConfigError: names the setting, and the nearest that works.
        DataError: a model's folder has no configuration.
    """
    learner = config.learner
    if learner.engine != "fsdp2":
        return
    check_shards(learner.parallel.shards or learner.ranks, learner.ranks)
    for folder in {config.model.path, *(role.path for role in learner.roles.values() if role.path)}:
        found = attention_heads(read_model_config(Path(folder), "model.path")) if Path(folder).is_dir() else None
        check_division(learner.parallel.sp, heads=found or learner.ranks, processes=learner.ranks, name=folder)
