"""The weights of a stored model, checkpoint or adapter, published as one version without a training engine.

Invariant: memory holds the version that is published, and one tensor of the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from rollmesh.learner.checkpoint.hf_folders import checkpoint_weights, is_checkpoint
from rollmesh.learner.engines.interface import ExportedTensor
from rollmesh.learner.model_files.adapter_folder import FolderAdapter, is_adapter_folder
from rollmesh.learner.model_files.full_weights import read_full
from rollmesh.learner.model_files.stored_model import StoredModel
from rollmesh.learner.weights import WeightPublisher
from rollmesh.mesh.config import Config
from rollmesh.mesh.errors import DataError
from rollmesh.mesh.trajectory.versions import PolicyVersion


def publish_stored(publisher: WeightPublisher, policy: PolicyVersion, config: Config, weights: Path | None) -> None:
    """Publishes a stored model as a version.

    Args:
        publisher: keeps it fetchable.
        policy: the version.
        config: `model` is a local folder, which gives architecture and tokenizer; `learner.lora` says what kind of
            adapter a checkpoint holds.
        weights: a checkpoint, or an adapter's folder; None: the weights of the model's folder.

    Raises:
        DataError: no such weights, damaged ones, or those of another model.
        WeightsError: there is no memory for them.
    """
    dtype: torch.dtype = getattr(torch, config.model.dtype)
    with StoredModel(Path(config.model.path)) as source:
        exported = [
            ExportedTensor(name, dtype if shaped.is_floating_point() else shaped.dtype, tuple(shaped.shape))
            for name, shaped in source.describe().items()
        ]
        publisher.publish_in_order(policy, exported, _read(source, dtype, config, weights))


def _read(
    source: StoredModel, dtype: torch.dtype, config: Config, weights: Path | None
) -> Iterator[tuple[str, Tensor]]:
    if weights is None:
        return read_full(source, dtype)
    if is_checkpoint(weights):
        return checkpoint_weights(weights, source, dtype, config.learner.lora)
    if is_adapter_folder(weights):
        return read_full(source, dtype, FolderAdapter(weights))
    raise DataError(
        f"{weights} is neither a checkpoint nor an adapter", hint="give a folder below RUN/checkpoints, or peft's"
    )
