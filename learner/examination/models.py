"""The folders of a run's models, examined before its engines are built."""

from __future__ import annotations

from pathlib import Path

from rollmesh.learner.algorithms.interface import Algorithm
from rollmesh.learner.examination.folder import examine
from rollmesh.learner.model_files.checks import check_role_tokens
from rollmesh.mesh.config.models import Config


def examine_models(config: Config, algorithm: Algorithm, *, read_s: float | None = None) -> list[str]:
    """Refuses folders that cannot be used; those of hub ids that are not here yet are left to their learner.

    Args:
        config: of the run.
        algorithm: names the roles, and says what kind of model each has.
        read_s: see `examine`.

    Returns:
        Sentences about what is in the folders, and is not used.

    Raises:
        DataError: naming the folder, and the key.
    """
    actor = Path(config.model.path)
    if not actor.is_dir():
        return []
    found = examine(actor, "model.path", read_s=read_s)
    for role in algorithm.needs.roles:
        section = config.learner.roles.get(role.name)
        if section is None or section.at == "elsewhere" or not section.path or not Path(section.path).is_dir():
            continue
        key, backbone_only = f"learner.roles.{role.name}.path", role.kind == "value_model"
        found += examine(Path(section.path), key, tokenizer=False, backbone_only=backbone_only, read_s=read_s)
        check_role_tokens(actor, Path(section.path), key)
    return found
