"""A Hugging Face folder of an engine's weights, whatever the engine: the leader writes what all send it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from rollmesh.learner.engines.interface import Engine
from rollmesh.learner.model_files.adapter_names import peft_name
from rollmesh.learner.model_files.classifier import SCORE, write_classifier
from rollmesh.learner.model_files.folder_writer import write_folder
from rollmesh.learner.model_files.location import local_folder
from rollmesh.learner.model_files.stored_model import StoredModel
from rollmesh.learner.model_files.value_head import HEAD
from rollmesh.mesh.config.inputs import ModelSection
from rollmesh.mesh.config.lora import LoraSection
from rollmesh.mesh.errors import DataError
from rollmesh.mesh.weights.peft_folder import write_peft_folder


def write_weights(
    engine: Engine, model: ModelSection, folder: Path, *, backbone_only: bool, classifier: bool = False
) -> None:
    """Writes configuration, tokenizer and weights; collective.

    Args:
        engine: with the weights.
        model: gives the rest, and the dtype of the weights.
        folder: see `Engine.export_hf`.
        backbone_only: the model has no output layer.
        classifier: write it as a sequence classifier, with the head of a value model without a constant term.

    Raises:
        DataError: the leader could not write them, in every process.
    """
    dtype: torch.dtype = getattr(torch, model.dtype)

    def write(tensors: Iterator[tuple[str, Tensor]]) -> None:
        if classifier:
            _write_classifier(engine, model, folder, tensors, dtype)
        else:
            _write(engine, model, folder, tensors, dtype, backbone_only)

    _write_together(engine, engine.export_weights(dtype), write)


def write_adapter(engine: Engine, model: ModelSection, lora: LoraSection, folder: Path) -> None:
    """Writes the adapter alone, in float32, as peft does; with it the head of a value model. Collective.

    Args:
        engine: with the adapter.
        model: its base.
        lora: describes the adapter.
        folder: to write; absent, or empty.

    Raises:
        DataError: the leader could not write it, in every process.
    """

    def write(tensors: Iterator[tuple[str, Tensor]]) -> None:
        factors = {name: tensor.clone() for name, tensor in tensors}
        weight = factors.pop(peft_name(f"{HEAD}.weight"), None)
        head = None if weight is None else (SCORE, weight)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_peft_folder(
                folder, factors, alpha=lora.alpha, rslora=lora.rank_stabilized, base=model.path, head=head
            )
        except OSError as error:
            raise DataError(
                f"{folder} cannot be written: {error.strerror or error}", hint="is the disk full?"
            ) from error

    _write_together(engine, engine.export_weights(torch.float32, part="adapter"), write)


def _write_together(
    engine: Engine, tensors: Iterator[tuple[str, Tensor]], write: Callable[[Iterator[tuple[str, Tensor]]], None]
) -> None:
    """Has the leader write tensors that all processes send; an error of any is an error of all."""
    failed: Exception | None = None
    if engine.layout.leads:
        try:
            write(tensors)
        except dist.DistError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is, the others wait for the rest of the tensors
            failed = error
    for _ in tensors:
        assert failed is not None, "full tensors are on the leader alone, which has written all"
    reason = "" if failed is None else str(failed) or type(failed).__name__
    reasons = engine.world.gather_failures(failed, reason)
    if failed is not None:
        raise failed
    for process, theirs in enumerate(reasons):
        if theirs:
            raise DataError(f"rank {process}: {theirs}")


def _write(
    engine: Engine,
    model: ModelSection,
    folder: Path,
    tensors: Iterator[tuple[str, Tensor]],
    dtype: torch.dtype,
    backbone_only: bool,
) -> None:
    with StoredModel(local_folder(model), backbone_only=backbone_only) as source:
        write_folder(folder, source, _described(engine, dtype), tensors, dtype)


def _write_classifier(
    engine: Engine, model: ModelSection, folder: Path, tensors: Iterator[tuple[str, Tensor]], dtype: torch.dtype
) -> None:
    with StoredModel(local_folder(model), backbone_only=True) as source:
        write_classifier(folder, source, _described(engine, dtype), tensors, dtype)


def _described(engine: Engine, dtype: torch.dtype) -> dict[str, Tensor]:
    """The tensors that the engine exports, without memory."""
    return {
        tensor.name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        for tensor in engine.exported_tensors(dtype)
    }
