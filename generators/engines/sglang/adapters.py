"""Adapters on a server: which layers have them, what the server needs of each, and how they come and go.

SGLang computes some layers together: query, key and value as one, and the two that lead into an MLP. It expects an
adapter of all of them or of none, and drops the rest without a word. So those that are missing are sent as zeros.

Invariants: an adapter is unloaded while the server decodes alone. The server waits until the adapter's last request has
ended, and loads no other one meanwhile; while it is paused, no request ends. So each pause waits for unloads first.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rollmesh.generators.engines.adapters import AdapterShape, AdapterWeights
from rollmesh.generators.engines.errors import EngineError
from rollmesh.generators.engines.external.served_adapters import MOST_ADAPTERS, LiveAdapter, ServedAdapters
from rollmesh.generators.engines.sglang.http_client import HttpClient, RefusedError
from rollmesh.generators.engines.sglang.transfers.sharing import Bucket, filled_bucket
from rollmesh.generators.engines.sglang.transfers.tensor import no_room
from rollmesh.mesh.errors import ConfigError, WeightsError
from rollmesh.mesh.runtime.background_tasks import BackgroundTasks
from rollmesh.mesh.weights.adapter import adapted_weight, factor_names
from rollmesh.mesh.weights.peft_folder import peft_config, rank_of

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

# Layers of dense models that it can adapt, by the last part of their names; each row is one layer of the server.
_PACKS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
_KNOWN = frozenset(("o_proj", "down_proj", "qkv_proj", "gate_up_proj")).union(*_PACKS)
_MERGE = "set learner.lora.push: merged"


def adapted_layers(shape: AdapterShape, linear: Iterable[str], *, experts: bool) -> frozenset[str]:
    """Last parts of the names of the layers that a server has to compute with adapters.

    Args:
        shape: of the adapters.
        linear: last parts of the names of all linear layers of the model's blocks.
        experts: the model is a mixture of experts.

    Raises:
        ConfigError: SGLang adapts none of the kind.
    """
    if experts:
        raise ConfigError(
            "learner.lora.push: served is for dense models where rollout.engine is sglang, and this is a mixture of "
            "experts",
            hint=_MERGE,
        )
    chosen = set(shape.targets or linear)
    if unknown := sorted(chosen - _KNOWN):
        raise ConfigError(
            f"learner.lora.push: served: SGLang computes no layer {unknown[0]!r} with an adapter",
            hint=f"{_MERGE}, or learner.lora.targets to some of {', '.join(sorted(_KNOWN))}",
        )
    return frozenset(chosen).union(*(pack for pack in _PACKS if chosen.intersection(pack)))


def adapter_arguments(shape: AdapterShape, layers: Iterable[str]) -> dict[str, Any]:
    """The server's arguments for adapters."""
    return {
        "enable-lora": True,
        "max-lora-rank": shape.rank,
        "lora-target-modules": sorted(layers),
        # Requests without an adapter count as one more.
        "max-loras-per-batch": MOST_ADAPTERS + 1,
    }


def completed(factors: Mapping[str, torch.Tensor], shapes: Mapping[str, Sequence[int]]) -> dict[str, torch.Tensor]:
    """Factors with zeros for the layers that the server computes together with adapted ones.

    Args:
        factors: A and B by peft's names.
        shapes: of all parameters of the base.
    """
    complete = dict(factors)
    for name, factor in factors.items():
        weight = adapted_weight(name)
        if weight is None or weight not in shapes:
            continue
        for partner in _partners(weight):
            a, b = factor_names(partner)
            if partner in shapes and a not in complete:
                rank = factors[factor_names(weight)[0]].shape[0]
                complete[a] = factor.new_zeros(rank, shapes[partner][1])
                complete[b] = factor.new_zeros(shapes[partner][0], rank)
    return complete


def _partners(weight: str) -> list[str]:
    layer = weight.removesuffix(".weight")
    block, _, last = layer.rpartition(".")
    return [f"{block}.{other}.weight" for pack in _PACKS if last in pack for other in pack if other != last]


class SharedAdapter:
    """An adapter in shared memory.

    Args:
        adapter: on the CPU.
        shapes: of all parameters of its base.

    Raises:
        WeightsError: there is no room for it.
    """

    def __init__(self, adapter: AdapterWeights, shapes: Mapping[str, Sequence[int]]) -> None:
        factors = completed(adapter.factors, shapes)
        self.config = peft_config(factors, alpha=adapter.scale * rank_of(factors), rslora=False, base="")
        try:
            self._bucket: Bucket | None = filled_bucket(list(factors.items()), lambda factor: factor.dtype)
        except (RuntimeError, MemoryError) as error:
            raise no_room(error) from error

    @property
    def bucket(self) -> Bucket:
        """All factors; not after `discard`."""
        assert self._bucket is not None, "it is loaded once"
        return self._bucket

    def discard(self) -> None:
        """See `AdapterForm`."""
        self._bucket = None


class AdapterLoader:
    """Loads and unloads the adapters of one server. Used in one event loop.

    Args:
        client: to the server.
        adapters: that it has.
        ranks: processes of the server that each take an adapter.
    """

    def __init__(self, client: HttpClient, adapters: ServedAdapters, ranks: int) -> None:
        self._client = client
        self._ranks = ranks
        self._adapters = adapters
        self._unloads = BackgroundTasks(self._on_unload_error)

    async def load(self, adapter: LiveAdapter) -> None:
        """Loads an adapter, also while the server is paused; gives its memory back.

        Raises:
            WeightsError: the server does not take it.
        """
        form: SharedAdapter = adapter.form
        body = {
            "lora_name": adapter.name,
            "config_dict": form.config,
            "serialized_named_tensors": [form.bucket.payload() for _ in range(self._ranks)],
            "load_format": "flattened_bucket",
        }
        try:
            await self._client.post("/load_lora_adapter_from_tensors", body)
        except RefusedError as error:
            raise WeightsError(
                f"SGLang does not take the adapter of version {adapter.label}: {error}",
                hint=f"{_MERGE}, or other learner.lora.targets",
            ) from error
        form.discard()

    def unload_idle(self) -> None:
        """Begins to unload the earlier adapters without jobs; the server decodes."""
        self._unload(self._adapters.take_idle())

    async def unload_all(self) -> None:
        """Unloads all adapters of a server that decodes, and runs no job."""
        self._unload(self._adapters.take_all())
        await self.settle()

    async def settle(self) -> None:
        """Waits until the server has unloaded them; each call of it has a deadline."""
        await self._unloads.drain()

    def close(self) -> None:
        """Gives up unloads: the server ends, or has them in its queue."""
        self._unloads.cancel()

    def _unload(self, adapters: Iterable[LiveAdapter]) -> None:
        for adapter in adapters:
            self._unloads.spawn(self._client.post("/unload_lora_adapter", {"lora_name": adapter.name}))

    def _on_unload_error(self, _: str, error: BaseException) -> None:
        # The death of a server is found elsewhere; else it keeps a few bytes that no request uses.
        level = logging.WARNING if isinstance(error, EngineError) else logging.ERROR
        log.log(level, "an adapter stays in the SGLang server: %s", error)
