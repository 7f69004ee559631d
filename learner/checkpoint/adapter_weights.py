"""The adapter that a checkpoint holds in place of a model."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from rollmesh.learner.engines.tensors.checkpoint_tensors import read_tensors
from rollmesh.learner.engines.tensors.state import MODEL_KEY
from rollmesh.learner.model_files.adapter_names import A_END, B_END, adapted_layer
from rollmesh.learner.model_files.value_head import HEAD
from rollmesh.mesh.errors import DataError


class CheckpointAdapter:
    """An adapter in a checkpoint.

    Args:
        checkpoint: written by any number of ranks.
        scale: of the adapter's products.

    Attributes:
        origin, scale, layers: see `rollmesh.learner.model_files.full_weights.Adapter`.

    Raises:
        DataError: the checkpoint has no adapter.
    """

    def __init__(self, checkpoint: Path, scale: float) -> None:
        self._checkpoint = checkpoint
        self._described = _describe(checkpoint)
        self.origin = f"checkpoint {checkpoint}"
        self.scale = scale
        self.layers = frozenset(layer for name in self._described if (layer := adapted_layer(name)) is not None)
        if not self.layers:
            raise DataError(
                f"checkpoint {checkpoint} holds no adapter", hint="leave learner.lora out: it was written without"
            )

    def read(self, layer: str) -> tuple[Tensor, Tensor]:
        """A and B of a layer, in float32."""
        wanted = {f"{layer}{end}": self._described[f"{layer}{end}"] for end in (A_END, B_END)}
        (_, a), (_, b) = read_tensors(self._checkpoint, wanted, torch.float32)
        return a, b

    def head(self) -> Tensor | None:
        """The weight of a value model's head, [1, hidden], in float32; None where the model has none."""
        wanted = {name: tensor for name, tensor in self._described.items() if name == f"{HEAD}.weight"}
        return next((weight for _, weight in read_tensors(self._checkpoint, wanted, torch.float32)), None)


def _describe(checkpoint: Path) -> dict[str, Tensor]:
    """The tensors of a checkpoint's model, without memory."""
    stored = FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    return {
        name.removeprefix(f"{MODEL_KEY}."): torch.empty(entry.size, device="meta")
        for name, entry in stored.items()
        if name.startswith(f"{MODEL_KEY}.") and isinstance(entry, TensorStorageMetadata)
    }
