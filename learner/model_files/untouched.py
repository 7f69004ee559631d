"""Tensors of a model's folder that training leaves as they are, and how a folder written from it has them.

Some belong to parts that the model does not use, such as a vision tower or layers that predict further tokens. Some
are stored in a wider dtype than the rest, such as the biases of routers.
"""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor

from rollmesh.learner.model_files.stored_model import StoredModel
from rollmesh.learner.model_files.weight_files import full_part


class UntouchedTensors:
    """Those of one folder that is written.

    Args:
        source: the model, open.
        dtype: of the floating-point tensors that are written.

    Attributes:
        carried: stored names of those that the model does not use, in order.
    """

    def __init__(self, source: StoredModel, dtype: torch.dtype) -> None:
        self._files, self._dtype = source.files, dtype
        is_whole = source.model.can_generate() and not source.backbone_only
        self.carried = source.plan.unused if is_whole else []
        self._wider = _wider(self._files.stored, dtype) if is_whole else frozenset()

    def read(self, name: str) -> Tensor:
        """A stored tensor, as it is.

        Raises:
            DataError: the file cannot be read.
        """
        return self._files.read(name, full_part(self._files.stored[name]))

    def describe(self, name: str) -> Tensor:
        """The same without memory."""
        return self._files.stored[name]

    def dtype_of(self, name: str, tensor: Tensor) -> torch.dtype:
        """The dtype in which a tensor is written.

        Args:
            name: as it is stored.
            tensor: in the written folder.
        """
        if name in self.carried or name in self._wider:
            return self._files.stored[name].dtype
        return self._dtype if tensor.is_floating_point() else tensor.dtype

    def kept(self, name: str, tensor: Tensor) -> Tensor:
        """A trained tensor as it is written: as wide as it was, and with its own bits if training left it as it was.

        Args:
            name: as it is stored.
            tensor: in the dtype that is written; without memory only its dtype matters.

        Raises:
            DataError: the file cannot be read.
        """
        if name not in self._wider:
            return tensor
        if tensor.is_meta:
            return tensor.to(self._files.stored[name].dtype)
        own = self.read(name)
        return own if torch.equal(own.to(self._dtype), tensor) else tensor.to(own.dtype)


def _wider(stored: dict[str, Tensor], dtype: torch.dtype) -> frozenset[str]:
    """Names of tensors that are wider than most of their folder, and than what is written."""
    numbers = {name: tensor for name, tensor in stored.items() if tensor.is_floating_point()}
    counts = Counter[torch.dtype]()
    for tensor in numbers.values():
        counts[tensor.dtype] += tensor.numel()
    most = max((kind.itemsize for kind, _ in counts.most_common(1)), default=0)
    least = max(most, dtype.itemsize)
    return frozenset(name for name, tensor in numbers.items() if tensor.itemsize > least)
