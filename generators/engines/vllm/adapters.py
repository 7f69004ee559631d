"""Adapters in vLLM: which arguments it starts with, and how one gets into the engine and out."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollmesh.generators.engines.adapters import AdapterWeights
from rollmesh.generators.engines.errors import EngineError
from rollmesh.generators.engines.external.served_adapters import MOST_ADAPTERS, LiveAdapter, ServedAdapters
from rollmesh.mesh.errors import ConfigError, WeightsError

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.async_llm import AsyncLLM

# The ranks for which its kernels are made.
_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)


def adapter_arguments(rank: int) -> dict[str, Any]:
    """The engine arguments for adapters of a rank.

    Raises:
        ConfigError: vLLM has no such rank.
    """
    fitting = next((known for known in _RANKS if known >= rank), None)
    if fitting is None:
        raise ConfigError(
            f"learner.lora.rank is {rank}, and vLLM serves adapters up to rank {_RANKS[-1]}",
            hint="set learner.lora.push: merged",
        )
    return {"enable_lora": True, "max_lora_rank": fitting, "max_loras": MOST_ADAPTERS, "max_cpu_loras": MOST_ADAPTERS}


@dataclass(slots=True, eq=False)
class StagedAdapter:
    """An adapter that is about to be loaded.

    Attributes:
        adapter: as it came.
        folder: with its files.
        base: staged tensors of its base; None where the engine has it.
    """

    adapter: AdapterWeights
    folder: Path
    base: Any


async def load_adapter(
    engine: AsyncLLM,
    adapters: ServedAdapters,
    staged: StagedAdapter,
    label: str,
    answer: Callable[[Any], Awaitable[Any]],
) -> None:
    """Takes idle adapters out of an engine with a base, and puts a new one in.

    Args:
        engine: paused.
        adapters: that it has.
        staged: with files alone.
        label: of its version.
        answer: awaits vLLM.

    Raises:
        WeightsError: vLLM does not take it; new jobs continue with the former one.
    """
    for idle in adapters.take_idle():
        await answer(engine.remove_lora(idle.number))
    try:
        await answer(engine.add_lora(_request(label, adapters.number_of(staged.folder), staged.folder)))
    except EngineError:
        raise
    except Exception as error:  # vLLM raises errors of its workers as they come
        raise WeightsError(
            f"vLLM does not take the adapter of version {label}: {error}",
            hint="set learner.lora.push: merged, or other learner.lora.targets",
        ) from error
    adapters.add(label, staged.folder)


def request_of(adapter: LiveAdapter | None) -> LoRARequest | None:
    """The part of a job's request that names its adapter."""
    return None if adapter is None else _request(adapter.label, adapter.number, adapter.folder)


def _request(label: str, number: int, folder: Path) -> LoRARequest:
    from vllm.lora.request import LoRARequest

    # Prefixes are found by the name: no other adapter ever has it, should a version come twice.
    return LoRARequest(f"{label}-{number}", number, str(folder))
