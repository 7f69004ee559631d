"""The beginning of a training: its identity, and the checkpoint in its folder from which it continues."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rollmesh.learner.checkpoint.compatibility import check_form, trained_form
from rollmesh.learner.checkpoint.names import CHECKPOINTS_NAME, list_checkpoints
from rollmesh.learner.engines.interface import STATE_NAME
from rollmesh.learner.engines.world import World
from rollmesh.learner.trainers.identity import KEY, check_identity, identity_of
from rollmesh.mesh.config.trainers.configs import TrainerConfig
from rollmesh.mesh.errors import DataError


@dataclass(frozen=True, slots=True)
class Beginning:
    """The beginning of this process's training.

    Attributes:
        identity: of the training.
        checkpoint: name of the one from which it continues; empty: from the first step.
        incarnation: of this process's start.
    """

    identity: Mapping[str, str]
    checkpoint: str = ""
    incarnation: int = 1

    @classmethod
    def find(cls, command: str, config: TrainerConfig) -> Beginning:
        """Looks into the folder of the run; for rank 0, before anything is loaded.

        Args:
            command: `sft`, `rm` or `dpo`.
            config: of the run; the model's path is a local folder.

        Raises:
            ConfigError: the run was begun with something else, or its checkpoint cannot be continued with these
                settings.
            DataError: its last checkpoint cannot be read.
        """
        identity = identity_of(command, config)
        if not (there := list_checkpoints(config.run.folder / CHECKPOINTS_NAME)):
            return cls(identity)
        version, path = there[-1]
        check_identity(config.run.folder, _said_by(path).get(KEY), identity)
        check_form(path, trained_form(config.learner))
        return cls(identity, path.name, version.incarnation + 1)


def agree(found: Beginning | None, world: World) -> Beginning:
    """The beginning that rank 0 has found, in every process; collective.

    Nodes may have cached different files.
    """
    message = b"" if found is None else json.dumps(asdict(found)).encode()
    (said,) = filter(None, world.gather_bytes(message))
    return Beginning(**json.loads(said))


def _said_by(checkpoint: Path) -> dict[str, Any]:
    """The caller's part of a checkpoint's state."""
    try:
        state: dict[str, Any] = json.loads((checkpoint / STATE_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"checkpoint {checkpoint} cannot be read: {error}", hint="start over with --fresh") from error
    extra = state.get("extra")
    return extra if isinstance(extra, dict) else state
