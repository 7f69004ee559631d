"""The worker's side of `SharedSender`: loads weights from memory that the generator has filled.

Invariants: the memory is checked before anything of the model changes. The whole set is loaded in one call, inside
vLLM's layerwise reload, because the linear layers of a CPU repack their weights.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from rollmesh.generators.engines.vllm.shared_weights import SharedLayout, map_tensors
from rollmesh.mesh.errors import WeightsError

# Errors travel as text: one that begins so has changed nothing.
REFUSED = "rollmesh refuses these weights"


@dataclass
class SharedInit(WeightTransferInitInfo):
    """The empty agreement of the two sides."""


@dataclass
class SharedUpdate(WeightTransferUpdateInfo):
    """The fields of a `SharedLayout`."""

    path: str
    nbytes: int
    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    offsets: list[int]


class SharedMemoryTransfer(WeightTransferEngine[SharedInit, SharedUpdate]):
    """Our back end of vLLM's weight transfer, `rollmesh` by name."""

    init_info_cls = SharedInit
    update_info_cls = SharedUpdate
    # The set is that of the model alone.
    supports_draft_weight_update = False

    def init_transfer_engine(self, init_info: SharedInit) -> None:
        """Does nothing: each update names its memory."""

    def start_weight_update(self) -> None:
        """Does nothing: the reload begins after the checks of the memory."""

    def receive_weights(self, update_info: SharedUpdate) -> None:
        """Loads a complete set.

        Raises:
            RuntimeError: beginning with `REFUSED` where nothing has changed; after any other error the model is a
                mixture, ready for another set.
        """
        try:
            tensors = map_tensors(SharedLayout(**vars(update_info)))
        except (WeightsError, ValueError) as error:
            raise RuntimeError(f"{REFUSED}: {error}") from error
        # Tied ones once, by their first name.
        expected = _loaded_names(name for name, _ in self.model.named_parameters())
        with self._packing():
            initialize_layerwise_reload(self.model)
            try:
                with disable_mtp_completeness_check():
                    loaded = self.model.load_weights(tensors)
            except BaseException:
                self._abandon_reload()
                raise
            finalize_layerwise_reload(self.model, self.model_config)
        # Layers for which nothing came keep what they had, without a word. Quantized ones have parameters of their own.
        if (
            loaded is not None
            and self.model_config.quantization is None
            and (missing := expected - _loaded_names(loaded))
        ):
            raise RuntimeError(f"{len(missing)} parameters were not loaded, the first is {min(missing)!r}")

    def _packing(self) -> AbstractContextManager[None]:
        """The packing that vLLM's reload leaves out on a CPU."""
        if self.device.type != "cpu":
            return nullcontext()
        from rollmesh.generators.engines.vllm import cpu

        return cpu.packing(self.model)

    def _abandon_reload(self) -> None:
        """Ends an incomplete reload: layers that were not complete get their former weights back."""
        for layer in self.model.modules():
            info = get_layerwise_info(layer)
            if info.can_load():
                info.load_numel = 0
                info.loaded_weights.clear()
        finalize_layerwise_reload(self.model, self.model_config)

    def finish_weight_update(self) -> None:
        """Does nothing: the set was complete."""

    def shutdown(self) -> None:
        """Does nothing: no state is kept between updates."""


def _loaded_names(names: Iterable[str]) -> set[str]:
    """The names by which vLLM reports parameters as loaded: without those of the layers around them, for adapters."""
    return {name.replace(".base_layer.", ".") for name in names}
