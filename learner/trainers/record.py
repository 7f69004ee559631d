"""The record of a training in its folder: the command, the configuration, and its held-out files by their content.

An edited held-out file makes evaluations another measurement, which is reported. Rows to train on are another matter:
`learner.trainers.identity` refuses a change of theirs.
"""

from __future__ import annotations

from pathlib import Path

from rollmesh.learner.recovery.run_identity import (
    CONFIG,
    Inputs,
    changed_inputs,
    file_inputs,
    held_out_files,
    read_inputs,
    write_inputs,
)
from rollmesh.learner.trainers.identity import COMMAND
from rollmesh.mesh.config import save_config
from rollmesh.mesh.config.trainers.configs import TrainerConfig
from rollmesh.mesh.files import write_atomically


def write_record(command: str, config: TrainerConfig) -> None:
    """Writes what is trained in a folder now.

    Args:
        command: `sft`, `rm` or `dpo`.
        config: as the user gave it.
    """
    folder = config.run.folder
    write_atomically(folder / COMMAND, f"{command}\n")
    save_config(config, folder / CONFIG)
    write_inputs(folder, _held_out(config))


def edited_held_out(folder: Path, config: TrainerConfig) -> list[str]:
    """The held-out files with another content than the recorded one.

    Raises:
        DataError: the record cannot be read.
    """
    return [key for key, _ in changed_inputs(read_inputs(folder), _held_out(config))]


def _held_out(config: TrainerConfig) -> Inputs:
    return file_inputs(held_out_files(config.data.eval))
