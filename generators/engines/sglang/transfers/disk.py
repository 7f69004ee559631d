"""A folder of safetensors, for a server that sees this host's files, or files shared with it."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors.torch import save_file

from rollmesh.generators.engines.sglang.transfers.interface import UPDATE_S, DtypeOf, ServerTransfer, StagedWeights
from rollmesh.mesh.errors import WeightsError

if TYPE_CHECKING:
    import torch

    from rollmesh.generators.engines.sglang.http_client import HttpClient

FILE_BYTES = 2 * 2**30


class StagedFolder(StagedWeights):
    """Files, full of weights.

    Attributes:
        folder: with them; gone after `discard`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def discard(self) -> None:
        """See Staged."""
        shutil.rmtree(self.folder, ignore_errors=True)


class DiskTransfer(ServerTransfer):
    """`/update_weights_from_disk`.

    Args:
        dtype_of: in which a tensor is sent.
        folder: in which the folders of versions are made.
    """

    def __init__(self, dtype_of: DtypeOf, folder: Path) -> None:
        self._dtype_of = dtype_of
        self._folder = folder

    def stage(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> StagedWeights:
        """See ServerTransfer."""
        staged = StagedFolder(Path(tempfile.mkdtemp(prefix="weights-", dir=self._folder)))
        try:
            self._write(staged.folder, tensors)
        except (OSError, RuntimeError, MemoryError) as error:
            staged.discard()
            raise WeightsError(f"no room in {self._folder} for new weights: {error}") from error
        return staged

    async def load(self, client: HttpClient, staged: StagedFolder, label: str) -> None:
        """See ServerTransfer."""
        body = {
            "model_path": str(staged.folder),
            "load_format": "safetensors",
            "flush_cache": False,
            "weight_version": label,
        }
        await client.post("/update_weights_from_disk", body, UPDATE_S)

    def _write(self, folder: Path, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        part: dict[str, torch.Tensor] = {}
        size = count = 0
        for name, tensor in tensors:
            # Tied tensors are written twice: a file refuses memory that is shared.
            part[name] = tensor.to("cpu", self._dtype_of(tensor), copy=True).contiguous()
            size += part[name].nbytes
            if size >= FILE_BYTES:
                save_file(part, folder / f"part-{count:05d}.safetensors")
                part, size, count = {}, 0, count + 1
        if part:
            save_file(part, folder / f"part-{count:05d}.safetensors")
