"""Methods of vLLM's workers; mixed into their class by vLLM (`worker_extension_cls`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

# Name of the method, for `collective_rpc`.
HELD_BYTES = "rollmesh_held_bytes"


class WorkerExtension:
    """The extension of each worker.

    Attributes:
        device: of the worker.
    """

    device: torch.device

    def rollmesh_held_bytes(self) -> int:
        """Bytes of its device that this worker holds now and gives back when it sleeps; on a CPU 0."""
        if self.device.type == "cpu":
            return 0
        from vllm.device_allocator import get_mem_allocator_instance

        areas = get_mem_allocator_instance().pointer_to_data.values()
        return sum(int(area.handle[1]) for area in areas if not area.is_asleep)
