"""Senders of weights from this process to vLLM's workers, all through vLLM's weight-transfer interface.

A sender stages a set of tensors while decoding continues, in any thread, and sends it while the engine is paused.
`SharedSender` is ours; `NativeSender` drives vLLM's own trainers, with this process in the trainer's place. Adapters
are loaded from files, next to a base that a sender has sent.
"""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest
from vllm.lora.request import LoRARequest

from rollmesh.generators.engines.errors import EngineError
from rollmesh.generators.engines.external.served_adapters import LiveAdapter, ServedAdapters
from rollmesh.generators.engines.vllm.shared_weights import SharedWeights
from rollmesh.generators.engines.vllm.worker_transfer import REFUSED
from rollmesh.mesh.errors import WeightsError

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

log = logging.getLogger(__name__)


class WeightSender(ABC):
    """A way of sending weights to vLLM's workers."""

    @abstractmethod
    async def connect(self, engine: AsyncLLM) -> None:
        """Agrees with the workers; once, after the engine has come up."""

    @abstractmethod
    def stage(self, tensors: Mapping[str, torch.Tensor]) -> Any:
        """Puts a complete set, by checkpoint names, where it can be sent from.

        Raises:
            WeightsError: there is no memory for it.
        """

    @abstractmethod
    async def send(self, staged: Any, label: str) -> None:
        """Sends a staged set to the workers; the engine labels the tokens that it samples from here on with `label`.

        Raises:
            WeightsError: the former weights are in service, whole.
            Exception: any error of vLLM's: the workers' weights are of no use.
        """

    def forget(self) -> None:  # noqa: B027 # most rely on nothing
        """Records that the workers have dropped their weights: the next set must not rely on them."""

    @abstractmethod
    def discard(self, staged: Any) -> None:
        """Gives a staged set back; any thread, may be called twice."""

    def close(self) -> None:  # noqa: B027 # most keep nothing
        """Gives back resources that are kept between updates."""


class SharedSender(WeightSender):
    """Memory that the workers map.

    The set in service is kept until the next one has been loaded, one copy in host memory. After a load that fails
    halfway it is loaded again. Where there is no memory for two sets it is released for the new one. With several
    workers nothing is restored: after an error of one of them vLLM takes the answers of the others for those of later
    calls.

    Args:
        workers: of vLLM.
    """

    def __init__(self, workers: int) -> None:
        self._can_restore = workers == 1
        self._engine: AsyncLLM | None = None
        self._served: tuple[SharedWeights, str] | None = None
        self._changes = threading.Lock()

    async def connect(self, engine: AsyncLLM) -> None:
        self._engine = engine
        await engine.init_weight_transfer_engine(WeightTransferInitRequest({}))

    def stage(self, tensors: Mapping[str, torch.Tensor]) -> SharedWeights:
        try:
            return SharedWeights(tensors)
        except WeightsError:
            if self._served is None:
                raise
        log.warning("no memory for the weights in service next to new ones: a load that fails will end this engine")
        self.forget()
        return SharedWeights(tensors)

    async def send(self, staged: SharedWeights, label: str) -> None:
        try:
            await self._load(staged, label)
        except Exception as error:
            if not self._can_restore:
                raise
            # vLLM passes errors of its workers on as bare text.
            if REFUSED not in str(error):
                if self._served is None:
                    raise
                log.warning("weights could not be loaded, the former ones are put back: %s", error)
                await self._load(*self._served)
            raise WeightsError(
                f"vLLM could not load weights: {error}", hint="the former ones are in service"
            ) from error
        self.forget()
        if self._can_restore:
            self._served = staged, label

    def discard(self, staged: SharedWeights) -> None:
        served = self._served
        if served is None or served[0] is not staged:
            staged.close()

    def forget(self) -> None:
        with self._changes:
            served, self._served = self._served, None
        if served is not None:
            served[0].close()

    def close(self) -> None:
        self.forget()

    async def _load(self, weights: SharedWeights, label: str) -> None:
        assert self._engine is not None, "connected at the start"
        await self._engine.start_weight_update()
        await self._engine.update_weights(WeightTransferUpdateRequest(asdict(weights.layout)))
        await self._engine.finish_weight_update(label)


async def load_adapter(
    engine: AsyncLLM, adapters: ServedAdapters, adapter: LiveAdapter, answer: Callable[[Any], Awaitable[Any]]
) -> None:
    """Takes idle adapters out of an engine with a base, and puts a new one in.

    Args:
        engine: paused.
        adapters: that it has.
        adapter: with files alone.
        answer: awaits vLLM.

    Raises:
        WeightsError: vLLM does not take it; new jobs continue with the former one.
    """
    for idle in adapters.take_idle():
        await answer(engine.remove_lora(idle.number))
    try:
        await answer(engine.add_lora(request_of(adapter)))
    except EngineError:
        raise
    except Exception as error:  # vLLM raises errors of its workers as they come
        raise WeightsError(
            f"vLLM does not take the adapter of version {adapter.label}: {error}",
            hint="set learner.lora.push: merged, or other learner.lora.targets",
        ) from error


def request_of(adapter: LiveAdapter) -> LoRARequest:
    """vLLM's name of an adapter, by which prefixes are found too."""
    return LoRARequest(adapter.name, adapter.number, str(adapter.form.path))
