"""The generators that `rollmesh run` starts: their names, their devices, and which of them share the learner's."""

from __future__ import annotations

from dataclasses import dataclass

from rollmesh.mesh.config.models import Config
from rollmesh.mesh.config.rollout import RolloutSection


@dataclass(frozen=True, slots=True)
class GeneratorPlace:
    """One generator.

    Attributes:
        name: of its process, and in its log.
        shares_devices: this one takes turns with the learner on the same devices.
    """

    name: str
    shares_devices: bool


def generator_places(config: Config) -> tuple[GeneratorPlace, ...]:
    """All of them; those with devices of their own first."""
    replicas, shared = config.rollout.replicas, shared_generators(config)
    all_share = config.placement.all_take_turns
    return (
        *(GeneratorPlace(f"generator-{index}", all_share) for index in range(replicas)),
        *(GeneratorPlace(f"shared-{index}", True) for index in range(shared)),
    )


def shared_generators(config: Config) -> int:
    """Generators in addition to `rollout.replicas`, on the learner's devices."""
    if config.placement.mode != "hybrid":
        return 0
    if config.placement.shared_generators is not None:
        return config.placement.shared_generators
    return max(1, config.learner.ranks // max(1, devices_per_generator(config.rollout)))


def devices_per_generator(rollout: RolloutSection) -> int:
    """CUDA devices over which one generator's engine spreads, those it sends weights from included."""
    if rollout.engine == "hf":
        return 1
    # Two processes of one NCCL group cannot share a device: the sender has one of its own.
    if rollout.engine == "vllm":
        return rollout.vllm.tensor_parallel * rollout.vllm.data_parallel + int(rollout.vllm.transfer == "nccl")
    sender = int(rollout.sglang.transfer == "distributed")
    if rollout.sglang.address is not None:
        return sender
    return rollout.sglang.tensor_parallel * rollout.sglang.data_parallel + sender
