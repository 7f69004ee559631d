"""Export of a checkpoint to a Hugging Face model folder that `transformers` and inference engines load."""

from __future__ import annotations

from pathlib import Path

from rollmesh.learner.builders import build_actor
from rollmesh.learner.checkpoint.names import CHECKPOINTS_NAME, STATE_NAME
from rollmesh.learner.checkpoint.store import ACTOR, CheckpointStore, load_checkpoint
from rollmesh.learner.model_files.location import resolve_model
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
    """Writes model and tokenizer with the checkpoint's weights, in `model.dtype`.

    Args:
        config: of the run; its model folder or hub id gives architecture and tokenizer.
        checkpoint: folder of a checkpoint, of any world size.
        out: folder to write; must not hold files yet.

    Raises:
        ConfigError: `out` is not empty.
        DataError: no such checkpoint, or a model that cannot be loaded.
    """
    if not (checkpoint / STATE_NAME).is_file():
        raise DataError(f"{checkpoint} is not a checkpoint", hint="give a folder below RUN/checkpoints")
    if out.exists() and any(out.iterdir()):
        raise ConfigError(f"{out} is not empty", hint="choose a new folder")
    engine = build_actor(config.model_copy(update={"model": resolve_model(config.model)}))
    try:
        load_checkpoint({ACTOR: engine}, checkpoint)
        engine.export_hf(out)
    finally:
        engine.close()
