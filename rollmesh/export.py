"""Export of a checkpoint to a folder that `transformers`, peft and inference engines load."""

from __future__ import annotations

from pathlib import Path

from rollmesh.learner.checkpoint.hf_folders import write_adapter_folder, write_hf_folder
from rollmesh.learner.checkpoint.names import CHECKPOINTS_NAME, list_checkpoints
from rollmesh.learner.model_files.location import resolve_model
from rollmesh.learner.written.folder import Expected
from rollmesh.mesh.config.models import Config
from rollmesh.mesh.config.trainers.configs import TrainerConfig
from rollmesh.mesh.errors import ConfigError, DataError


def latest_checkpoint(run: Path) -> Path:
    """The checkpoint of a run that was written last.

    Raises:
        DataError: the run has no checkpoint.
    """
    found = [path for _, path in list_checkpoints(run / CHECKPOINTS_NAME)]
    if not found:
        raise DataError(f"run {run} has no checkpoint yet", hint="see checkpoint.every_steps and checkpoint.every_s")
    return found[-1]


def export_checkpoint(config: Config | TrainerConfig, checkpoint: Path, out: Path) -> None:
    """Writes model and tokenizer with the checkpoint's weights, in `model.dtype`, tensor by tensor and on no device.

    A reward model becomes a sequence classifier.

    Args:
        config: of the run; its model folder or hub id gives architecture and tokenizer.
        checkpoint: folder of a checkpoint, of any world size.
        out: folder to write; must not hold files yet.

    Raises:
        ConfigError: `out` is not empty, or the checkpoint is of another engine than `fsdp2` and `megatron`.
        DataError: no such checkpoint, or a damaged one, or one of another model; or a model that cannot be loaded. The
            written folder is not what was trained.
    """
    _require_readable(config)
    local = config.model_copy(update={"model": resolve_model(config.model)})
    write_hf_folder(checkpoint, Expected.of(local), out, config.learner.lora)


def export_adapter(config: Config | TrainerConfig, checkpoint: Path, out: Path) -> None:
    """Writes a checkpoint's adapter alone: a folder that `PeftModel.from_pretrained` loads onto the run's model.

    Args:
        config: of the run, with `learner.lora`.
        checkpoint: folder of a checkpoint, of any world size.
        out: folder to write; must not hold files yet.

    Raises:
        ConfigError: the run trains no adapter; else as for `export_checkpoint`.
        DataError: see `export_checkpoint`.
    """
    _require_readable(config)
    if config.learner.lora is None:
        raise ConfigError("the run trains no adapter: learner.lora is not set", hint="leave --adapter out")
    write_adapter_folder(checkpoint, Path(resolve_model(config.model).path), config.learner.lora, out)


def _require_readable(config: Config | TrainerConfig) -> None:
    if not config.learner.has_readable_checkpoints:
        raise ConfigError(
            "only checkpoints of fsdp2 and megatron are read without their engine, and learner.engine is "
            f"{config.learner.engine}",
            hint="`export_hf` of that engine writes the folder",
        )
