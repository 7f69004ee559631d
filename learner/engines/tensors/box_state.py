"""Tensors in boxes, as torch.distributed.checkpoint saves and loads them.

A process names the boxes that it has of a full tensor. Those of all processes fill it when it is saved; what several
processes name alike is saved once. Any other division can load it: DTensors, plain tensors, other boxes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.cuda import _pin_memory_utils as pin_memory_utils
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from rollmesh.learner.engines.tensors.boxes import Box, box_shape, box_start


class BoxedTensor:
    """This process's boxes of a tensor; a value of a state dict. Methods with underscores are what torch asks for.

    Args:
        shape, dtype: of the full tensor.
        parts: boxes, which do not overlap, each with a view of its shape and of the full tensor's dtype. Views have any
            strides, and are on any device. There may be none; those without elements are left out.
    """

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, parts: Iterable[tuple[Box, Tensor]]) -> None:
        self.shape, self.dtype = torch.Size(shape), dtype
        self.parts = [(box, view.detach()) for box, view in parts if view.numel()]
        for box, view in self.parts:
            assert (box_shape(box), dtype) == (tuple(view.shape), view.dtype), f"{box} is not of {view.shape}"

    def size(self) -> torch.Size:
        """The full tensor's shape; torch compares it with that of the saved one."""
        return self.shape

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                index=MetadataIndex(name, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, self.shape),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(box_start(box)), view.shape) for box, view in self.parts]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return next(view for box, view in self.parts if box_start(box) == index.offset)

    def __deepcopy__(self, _: object) -> BoxedTensor:
        # By torch's stager, which would copy all of the memory that a view is in: `BoxCopies` has copied the boxes.
        return self


class BoxSavePlanner(DefaultSavePlanner):
    """Finds boxes, which torch looks for in tensors alone."""

    def lookup_object(self, index: MetadataIndex) -> Any:
        """The value that is saved under a name and an offset."""
        value = self.state_dict[index.fqn]
        return value.__get_tensor_shard__(index) if isinstance(value, BoxedTensor) else super().lookup_object(index)


class BoxLoadPlanner(DefaultLoadPlanner):
    """Finds boxes, and keeps them: torch clears a state dict of what is neither a tensor nor a plain value."""

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Takes the state dict into which is loaded.

        Raises:
            ValueError: the checkpoint has tensors of the model that the state dict lacks.
        """
        super().set_up_planner({}, metadata, is_coordinator)
        self.original_state_dict = state_dict
        self.state_dict, self.mappings = flatten_state_dict(state_dict)
        saved = () if metadata is None else metadata.state_dict_metadata
        unknown = sorted(name for name in saved if name.startswith("model.") and name not in self.state_dict)
        if unknown:
            raise ValueError(f"the model lacks {len(unknown)} tensor(s) of the checkpoint, {unknown[0]} among them")

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """The memory into which is loaded."""
        value = self.state_dict[index.fqn]
        return value.__get_tensor_shard__(index) if isinstance(value, BoxedTensor) else super().lookup_tensor(index)


class BoxCopies:
    """Copies of boxes in host memory, which is kept from one checkpoint to the next.

    Args:
        pinned: the boxes are on CUDA. Copies are complete when the device has been waited for.
    """

    def __init__(self, *, pinned: bool) -> None:
        self._pinned = pinned
        self._kept: dict[str, list[Tensor]] = {}

    def copied(self, state: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
        """The state with copies in the place of boxes; all else is as it was.

        Args:
            state: nested, with the same boxes each time.
            prefix: of its names.
        """
        found: dict[str, Any] = {}
        for key, value in state.items():
            name = f"{prefix}{key}."
            if isinstance(value, BoxedTensor):
                found[key] = self._copy(name, value)
            else:
                found[key] = self.copied(value, name) if isinstance(value, Mapping) else value
        return found

    def close(self) -> None:
        """Frees the memory."""
        kept, self._kept = self._kept, {}
        if self._pinned:
            for copy in (copy for copies in kept.values() for copy in copies):
                pin_memory_utils.unpin_memory(copy.data_ptr())

    def _copy(self, name: str, value: BoxedTensor) -> BoxedTensor:
        if name not in self._kept:
            self._kept[name] = [self._reserve(view) for _, view in value.parts]
        copies = self._kept[name]
        for (_, view), copy in zip(value.parts, copies, strict=True):
            copy.copy_(view, non_blocking=self._pinned)
        return BoxedTensor(value.shape, value.dtype, zip((box for box, _ in value.parts), copies, strict=True))

    def _reserve(self, view: Tensor) -> Tensor:
        memory = torch.empty(view.shape, dtype=view.dtype)
        if self._pinned:
            # Torch's own pinned memory is rounded up to powers of two.
            pin_memory_utils.pin_memory(memory.data_ptr(), memory.nbytes)
        return memory
