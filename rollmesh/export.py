"""Export of a checkpoint to a Hugging Face model folder that `transformers` and inference engines load."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from rollmesh.learner.checkpoint.digests import check_actor_digests
from rollmesh.learner.checkpoint.names import CHECKPOINTS_NAME, STATE_NAME
from rollmesh.learner.checkpoint.store import CheckpointStore
from rollmesh.learner.engines.fsdp2.checkpoint_tensors import read_tensors
from rollmesh.learner.model_files.folder_writer import write_folder
from rollmesh.learner.model_files.location import resolve_model
from rollmesh.learner.model_files.stored_model import StoredModel
from rollmesh.mesh.config.models import Config
from rollmesh.mesh.errors import ConfigError, DataError


def latest_checkpoint(run: Path) -> Path:
    """The checkpoint of a run that was written last.

    Raises:
        DataError: the run has no checkpoint.
    """
    found = [path for _, path in CheckpointStore(run / CHECKPOINTS_NAME).list()]
    if not found:
        raise DataError(f"run {run} has no checkpoint yet", hint="see checkpoint.every_steps and checkpoint.every_s")
    return found[-1]


def export_checkpoint(config: Config, checkpoint: Path, out: Path) -> None:
    """Writes model and tokenizer with the checkpoint's weights, in `model.dtype`, tensor by tensor and on no device.

    Args:
        config: of the run; its model folder or hub id gives architecture and tokenizer.
        checkpoint: folder of a checkpoint, of any world size.
        out: folder to write; must not hold files yet.

    Raises:
        ConfigError: `out` is not empty.
        DataError: no such checkpoint, or a damaged one, or one of another model; or a model that cannot be loaded.
    """
    if not (checkpoint / STATE_NAME).is_file():
        raise DataError(f"{checkpoint} is not a checkpoint", hint="give a folder below RUN/checkpoints")
    if out.exists() and any(out.iterdir()):
        raise ConfigError(f"{out} is not empty", hint="choose a new folder")
    dtype = getattr(torch, config.model.dtype)
    with StoredModel(Path(resolve_model(config.model).path)) as source:
        check_actor_digests(checkpoint)
        described = source.describe()
        tensors = read_tensors(checkpoint, described, dtype)
        try:
            write_folder(out, source, described, tensors, dtype)
        except BaseException:
            # Half a model is of no use, and the folder could not be given again.
            shutil.rmtree(out, ignore_errors=True)
            raise
