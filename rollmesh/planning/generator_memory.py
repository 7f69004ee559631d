"""Memory of one generator on one of its devices: arithmetic over the engine's settings."""

from __future__ import annotations

from dataclasses import dataclass

from rollmesh.mesh.config.rollout import RolloutSection
from rollmesh.planning.cluster import GIB
from rollmesh.planning.shape import ModelShape

# The engine's own default shares of what is free (`generators/engines/hf/kv_budget.py`), and SGLang's on CUDA.
_HF_SHARE = {True: 0.8, False: 0.5}
_SGLANG_SHARE = {True: 0.85, False: 0.5}
# CUDA graphs, activations of a prefill, sampling: vLLM and SGLang measure them at their start.
_ENGINE_WORK = 3 * GIB
_GRAPHS = "graphs and activations"
# A part of that stays in a sleeping engine: CUDA graphs, and the pools that they own. Contexts of its processes are in
# the reserve of the device. An assumption, until it is measured.
_ASLEEP = GIB


@dataclass(frozen=True, slots=True)
class GeneratorMemory:
    """The memory of one generator on one device.

    Attributes:
        parts: bytes by component.
        kv_tokens: tokens for which its KV cache has room, over all of its devices. The engine `hf` takes no more memory
            than `wanted_tokens` need.
        wanted_tokens: tokens of `rollout.slots` sequences of the longest kind.
        longest: tokens of one such sequence.
    """

    parts: dict[str, int]
    kv_tokens: int
    wanted_tokens: int
    longest: int

    @property
    def asleep(self) -> int:
        """Bytes that it keeps while it sleeps, beyond its processes' reserve."""
        return min(_ASLEEP, self.parts.get(_GRAPHS, 0))

    @property
    def weights(self) -> int:
        """Bytes of one set of weights."""
        return self.parts["weights"]

    @property
    def total(self) -> int:
        """Bytes in all."""
        return sum(self.parts.values())

    @property
    def full_sequences(self) -> int:
        """Sequences of the longest kind that the KV cache holds at once."""
        return self.kv_tokens // self.longest


def generator_memory(
    rollout: RolloutSection,
    shape: ModelShape,
    dtype_bytes: int,
    memory: int,
    *,
    cuda: bool,
    taken_by_others: int,
    sharing: int,
) -> GeneratorMemory:
    """The memory of a generator.

    Args:
        rollout: of the run.
        shape: of the model.
        dtype_bytes: of an element in which generators compute.
        memory: bytes of the device.
        cuda: the device is no CPU.
        taken_by_others: bytes of the device that other processes take.
        sharing: generators on the device.
    """
    wanted = rollout.slots * rollout.context_tokens
    weights = shape.merged * dtype_bytes
    if rollout.engine == "hf":
        kv = shape.kv_elements * dtype_bytes
        # Each brings a second set with every update.
        free = memory - taken_by_others - 2 * weights * sharing
        gib = rollout.hf.kv_cache_gib
        room = round(gib * GIB) if gib is not None else max(0, round(_HF_SHARE[cuda] * free) // sharing)
        taken = min(room, wanted * kv)
        parts = {"weights": weights, "new weights": weights, "KV cache": taken}
        return GeneratorMemory(parts, taken // kv if kv else wanted, wanted, rollout.context_tokens)
    kv = shape.compressed_kv_elements * dtype_bytes
    if rollout.engine == "vllm":
        copies, devices = rollout.vllm.data_parallel, rollout.vllm.tensor_parallel
        whole = round(rollout.vllm.gpu_memory_utilization * memory)
        fixed = None if cuda else round(rollout.vllm.kv_cache_gib * GIB)
    else:
        copies, devices = rollout.sglang.data_parallel, rollout.sglang.tensor_parallel
        whole = round((rollout.sglang.mem_fraction or _SGLANG_SHARE[cuda]) * memory)
        tokens = rollout.sglang.kv_cache_tokens
        fixed = None if tokens is None else tokens * kv // devices
    held = weights // devices
    work = _ENGINE_WORK if cuda else 0
    room = max(0, whole - held - work) if fixed is None else fixed
    tokens = copies * devices * room // kv if kv else wanted
    parts = {"weights": held, _GRAPHS: work, "KV cache": room}
    return GeneratorMemory(parts, tokens, wanted, rollout.context_tokens)
