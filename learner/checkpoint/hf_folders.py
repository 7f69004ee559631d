"""Checkpoints as Hugging Face folders, which `transformers` and inference engines load.

They are read from a checkpoint's files, tensor by tensor: without an engine, a device or other ranks.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from rollmesh.learner.checkpoint.adapter_weights import CheckpointAdapter
from rollmesh.learner.checkpoint.best import best_checkpoint
from rollmesh.learner.checkpoint.digests import check_actor_digests
from rollmesh.learner.checkpoint.names import CHECKPOINTS_NAME, checkpoint_name, newest_version
from rollmesh.learner.engines.interface import STATE_NAME
from rollmesh.learner.engines.tensors.checkpoint_tensors import read_tensors
from rollmesh.learner.model_files.adapter_names import A_END, B_END, peft_name
from rollmesh.learner.model_files.classifier import SCORE, value_model_tensors, write_classifier
from rollmesh.learner.model_files.folder_writer import write_folder
from rollmesh.learner.model_files.full_weights import read_full
from rollmesh.learner.model_files.stored_model import StoredModel
from rollmesh.learner.model_files.value_head import HEAD
from rollmesh.learner.written.adapter import check_written_adapter
from rollmesh.learner.written.folder import Expected, finish_folder
from rollmesh.mesh.config import Config
from rollmesh.mesh.config.lora import LoraSection
from rollmesh.mesh.errors import ConfigError, DataError
from rollmesh.mesh.weights.peft_folder import write_peft_folder

log = logging.getLogger(__name__)
FOLDER = "hf"
"""Folder in a run's, of the folders that it leaves."""


def write_hf_folder(checkpoint: Path, expected: Expected, out: Path, lora: LoraSection | None = None) -> None:
    """Writes model and tokenizer with a checkpoint's weights.

    Args:
        checkpoint: of any world size.
        expected: of the folder; the checkpoint of a reward model becomes a sequence classifier with one label.
        out: folder to write; must not hold files yet.
        lora: the adapter that the checkpoint holds; it is merged with the model of the folder.

    Raises:
        ConfigError: `out` is not empty, is a file, or cannot be a folder.
        DataError: no such checkpoint, or a damaged one, or one of another model; or a model that cannot be loaded. The
            written folder is not what was trained.
    """
    require_checkpoint(checkpoint)
    out, dtype = _empty(out), expected.dtype
    with StoredModel(expected.source, backbone_only=expected.classifier) as source:
        tensors = checkpoint_weights(checkpoint, source, dtype, lora)
        try:
            if expected.classifier:
                write_classifier(out, source, value_model_tensors(source), tensors, dtype)
            else:
                write_folder(out, source, source.describe(), tensors, dtype)
            finish_folder(out, expected)
        except BaseException:
            # Half a model is of no use, and the folder could not be given again.
            shutil.rmtree(out, ignore_errors=True)
            raise


def is_checkpoint(folder: Path) -> bool:
    """True where a folder is a complete checkpoint."""
    return (folder / STATE_NAME).is_file()


def require_checkpoint(folder: Path) -> None:
    """Refuses a folder that is no checkpoint.

    Raises:
        DataError: it is none.
    """
    if not is_checkpoint(folder):
        raise DataError(f"{folder} is not a checkpoint", hint="give a folder below RUN/checkpoints")


def checkpoint_weights(
    checkpoint: Path, source: StoredModel, dtype: torch.dtype, lora: LoraSection | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Full tensors of a checkpoint's model in its order, on the CPU; each is read when it is asked for.

    Args:
        checkpoint: of any world size.
        source: the model that gives the architecture, open; with an adapter, its base. Where its output layer is not
            used, the checkpoint is of a value model on its backbone.
        dtype: of floating-point tensors.
        lora: the adapter that the checkpoint holds; it is merged with the model.

    Raises:
        DataError: a damaged checkpoint, or one of another model.
    """
    check_actor_digests(checkpoint)
    described = value_model_tensors(source) if source.backbone_only else source.describe()
    if lora is None:
        return read_tensors(checkpoint, described, dtype)
    # The base has no head: it is trained whole, and is in the checkpoint.
    head = {name: described.pop(name) for name in list(described) if name.startswith(f"{HEAD}.")}
    base = read_full(source, dtype, CheckpointAdapter(checkpoint, lora.scale), described)
    return chain(base, read_tensors(checkpoint, head, dtype))


def write_adapter_folder(checkpoint: Path, model: Path, lora: LoraSection, out: Path) -> None:
    """Writes a checkpoint's adapter alone, as peft does, in float32; with it the head of a reward model.

    Args:
        checkpoint: of any world size.
        model: folder of the base.
        lora: the adapter that the checkpoint holds.
        out: folder to write; must not hold files yet.

    Raises:
        ConfigError, DataError: see `write_hf_folder`.
    """
    require_checkpoint(checkpoint)
    out = _empty(out)
    check_actor_digests(checkpoint)
    adapter = CheckpointAdapter(checkpoint, lora.scale)
    factors = {}
    for layer in sorted(adapter.layers):
        for end, matrix in zip((A_END, B_END), adapter.read(layer), strict=True):
            factors[peft_name(f"{layer}{end}")] = matrix
    weight = adapter.head()
    head = None if weight is None else (SCORE, weight)
    try:
        out.mkdir(parents=True, exist_ok=True)
        write_peft_folder(out, factors, alpha=lora.alpha, rslora=lora.rank_stabilized, base=str(model), head=head)
        check_written_adapter(out, model)
    except DataError:
        shutil.rmtree(out, ignore_errors=True)
        raise
    except OSError as error:
        shutil.rmtree(out, ignore_errors=True)
        raise DataError(f"{out} cannot be written: {error.strerror or error}", hint="is the disk full?") from error


def _empty(out: Path) -> Path:
    """The folder that a path leads to, also through links; absent, or without files."""
    try:
        place = out.resolve()
        if place.exists() and not place.is_dir():
            raise ConfigError(f"{out} is a file", hint="choose a new folder")
        if place.exists() and any(place.iterdir()):
            raise ConfigError(f"{out} is not empty", hint="choose a new folder")
    except (OSError, RuntimeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{out} cannot be a folder: {reason}", hint="choose a new folder") from error
    return place


def leave_hf_folders(config: Config) -> None:
    """Writes the folders that `checkpoint.hf` names, in place of those of an earlier end of the run.

    A folder that cannot be written is missing, and only that one: the log names it, and `rollmesh export` can do it
    later.

    Args:
        config: of a run that is complete; the model's path is a local folder.
    """
    checkpoints = config.run.folder / CHECKPOINTS_NAME
    for which in config.checkpoint.hf:
        out = config.run.folder / FOLDER / which
        unfinished = out.with_name(f".partial-{which}")
        shutil.rmtree(unfinished, ignore_errors=True)
        try:
            checkpoint = checkpoints / _name(checkpoints, best=which == "best")
            write_hf_folder(checkpoint, Expected.of(config), unfinished, config.learner.lora)
            shutil.rmtree(out, ignore_errors=True)
            unfinished.rename(out)
        except (ConfigError, DataError, OSError) as error:
            log.warning("%s is not written: %s; `rollmesh export` writes it later", out, error)
        else:
            log.info("%s has the weights of %s", out, checkpoint.name)


def _name(checkpoints: Path, *, best: bool) -> str:
    if best:
        if (found := best_checkpoint(checkpoints)) is None:
            raise DataError("no checkpoint is the best", hint="see data.eval and checkpoint.best")
        return found.checkpoint
    if (last := newest_version(checkpoints)) is None:
        raise DataError("there is no checkpoint")
    return checkpoint_name(last)
