"""Methods of vLLM's workers; mixed into their class by vLLM (`worker_extension_cls`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

# Names of the methods, for `collective_rpc`.
HELD_BYTES = "rollmesh_held_bytes"
PLAIN_BYTES = "rollmesh_plain_bytes"


class WorkerExtension:
    """The extension of each worker.

    Attributes:
        device: of the worker.
        model_runner: has the model.
    """

    device: torch.device
    model_runner: Any

    def rollmesh_held_bytes(self) -> int:
        """Bytes of its device that this worker holds now and gives back when it sleeps; on a CPU 0."""
        if self.device.type == "cpu":
            return 0
        from vllm.device_allocator import get_mem_allocator_instance

        areas = get_mem_allocator_instance().pointer_to_data.values()
        return sum(int(area.handle[1]) for area in areas if not area.is_asleep)

    def rollmesh_plain_bytes(self) -> int:
        """Bytes of the weights that are not packed: on a CPU kernels keep those of linear layers in another form."""
        return sum(int(parameter.nbytes) for parameter in self.model_runner.model.parameters())
