"""The model that is evaluated: a Hugging Face folder or hub id, a run or one of its checkpoints, or an adapter."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from rollmesh.learner.checkpoint.best import best_checkpoint
from rollmesh.learner.checkpoint.names import CHECKPOINTS_NAME, list_checkpoints
from rollmesh.mesh.config.inputs import ModelSection
from rollmesh.mesh.config.lora import LoraSection
from rollmesh.mesh.config.models import Config
from rollmesh.mesh.config.trainers.configs import RewardModelConfig
from rollmesh.mesh.errors import DataError
from rollmesh.run_files import is_run, read_any_config


@dataclass(frozen=True, slots=True)
class ModelChoice:
    """A model to evaluate.

    Attributes:
        name: for people, and for a folder's name.
        base: gives architecture and tokenizer, and the weights where there are no others.
        weights: a checkpoint or an adapter's folder; None: those of the base.
        lora: the adapter that a checkpoint holds; None: it holds the whole model.
        reason: for people, where a run was given: why this checkpoint.
    """

    name: str
    base: ModelSection
    weights: Path | None = None
    lora: LoraSection | None = None
    reason: str = ""


def choose_model(config: Config, given: str | None) -> ModelChoice:
    """The model that a user means.

    Args:
        config: gives the dtype, and the model where none is given.
        given: folder or hub id of a model, or folder of a run, of a checkpoint or of peft's adapter. A run stands for
            its best checkpoint, or for the latest where none is the best.

    Raises:
        DataError: nothing is there, a run without a checkpoint, or an adapter whose base is not known.
    """
    if given is None:
        return ModelChoice(Path(config.model.path).name, config.model)
    path = Path(given)
    if is_run(path):
        checkpoint, reason = _checkpoint_of_run(path)
        return replace(_of_checkpoint(checkpoint, path), reason=reason)
    _refuse_missing(path, given)
    if path.parent.name == CHECKPOINTS_NAME:
        run = path.parent.parent
        return _of_checkpoint(path, run) if is_run(run) else _own_base(config, path)
    # They load torch.
    from rollmesh.learner.checkpoint.hf_folders import FOLDER
    from rollmesh.learner.model_files.adapter_folder import is_adapter_folder, read_adapter_config

    run = path.parent.parent
    # The folders `last` and `best` of all runs are called alike.
    name = f"{run.name}-{path.name}" if path.parent.name == FOLDER and is_run(run) else path.name
    if is_adapter_folder(path):
        base = read_adapter_config(path)[1] or config.model.path
        return ModelChoice(name, _model(config, base), path.absolute())
    return ModelChoice(name, _model(config, given))


def _refuse_missing(path: Path, given: str) -> None:
    """Refuses a path that leads nowhere; a name with one slash at most may be of the hub."""
    if path.exists():
        return
    if path.parent.name == CHECKPOINTS_NAME:
        there = [found.name for _, found in list_checkpoints(path.parent)]
        raise DataError(
            f"{given} does not exist", hint=f"checkpoints there: {', '.join(there) or 'none'}; a run is its best one"
        )
    if path.is_absolute() or given.startswith((".", "~")) or given.count("/") > 1:
        raise DataError(
            f"{given} does not exist", hint="give the folder of a model, run, checkpoint or adapter, or a hub id"
        )


def _model(config: Config, path: str) -> ModelSection:
    same = path == config.model.path
    return config.model.model_copy(update={"path": path} | ({} if same else {"revision": None}))


def _own_base(config: Config, checkpoint: Path) -> ModelChoice:
    """A checkpoint that was taken out of its run: the configuration has to say what it is of."""
    return ModelChoice(checkpoint.name, config.model, checkpoint.absolute(), config.learner.lora)


def _of_checkpoint(checkpoint: Path, run: Path) -> ModelChoice:
    config = read_any_config(run)
    if isinstance(config, RewardModelConfig):
        raise DataError(f"{run} has a reward model, which answers nothing", hint=f"score with `model:{run}/hf/last`")
    if not config.learner.has_readable_checkpoints:
        raise DataError(
            f"{checkpoint} is of learner.engine {config.learner.engine}, and only those of fsdp2 and megatron are read",
            hint="give a folder that `export_hf` of that engine has written",
        )
    name = f"{run.name}-{checkpoint.name}"
    return ModelChoice(name, config.model, checkpoint.absolute(), config.learner.lora)


def _checkpoint_of_run(run: Path) -> tuple[Path, str]:
    best = best_checkpoint(run / CHECKPOINTS_NAME)
    if best is not None:
        reason = f"the best of the run: {best.metric} {best.value:.4g}, reached first at version {best.version}"
        return run / CHECKPOINTS_NAME / best.checkpoint, reason
    found = [path for _, path in list_checkpoints(run / CHECKPOINTS_NAME)]
    if not found:
        raise DataError(f"run {run} has no checkpoint yet", hint="give a model's folder, or wait for the first one")
    return found[-1], "the latest of the run"
