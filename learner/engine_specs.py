"""From the configuration of a learner to the specification of an engine, whatever is trained."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from rollmesh.learner.engines.device_peaks import peak_tflops
from rollmesh.learner.engines.interface import EngineSpec
from rollmesh.mesh.config.base import DeviceName
from rollmesh.mesh.config.inputs import ModelSection
from rollmesh.mesh.config.learner import EngineSection, OptimizerSection
from rollmesh.mesh.config.lora import LoraSection
from rollmesh.mesh.config.parallel import ParallelSection, RouterSection
from rollmesh.mesh.errors import ConfigError
from rollmesh.mesh.runtime.devices import DeviceType, choose_device


def engine_spec(
    learner: EngineSection,
    model: ModelSection,
    optimizer: OptimizerSection | None,
    *,
    total_steps: int,
    seed: int,
    longest: int,
    parallel: ParallelSection,
    lora: LoraSection | None = None,
    frozen: tuple[str, ...] = (),
    router: RouterSection | None = None,
    entropy_gradient: bool = False,
    head_bias: bool = True,
    offload: bool = False,
    rest_folder: Path | None = None,
) -> EngineSpec:
    """The specification of one model's engine on this rank.

    Args:
        learner: gives device, dtype, kernels, memory and deadlines.
        model: to be loaded.
        optimizer, total_steps, seed, longest, parallel, lora, frozen, router: see `EngineSpec`.
        entropy_gradient, head_bias, offload, rest_folder: likewise.

    Raises:
        ConfigError: CUDA is asked for and absent.
    """
    device = device_of(learner.device)
    param_dtype, recompute = learner.compute_on(device)
    return EngineSpec(
        model=model,
        optimizer=optimizer,
        total_steps=total_steps,
        device=device,
        param_dtype=param_dtype,
        float32_logits=learner.float32_logits,
        activation_checkpointing=recompute,
        compile=learner.compile,
        seed=seed,
        entropy_gradient=entropy_gradient,
        head_bias=head_bias,
        attention=learner.attention,
        sync_once=learner.gradient_sync == "step",
        memory=learner.memory,
        parallel=parallel,
        megatron=learner.megatron,
        lora=lora,
        frozen=frozen,
        router=router or RouterSection(),
        offload=offload,
        rest_folder=rest_folder,
        longest=longest,
        timeout_s=learner.distributed.timeout_s,
        peak_tflops=learner.device_peak_tflops or _peak_tflops(device, param_dtype),
    )


def device_of(setting: DeviceName) -> DeviceType:
    """The device of this rank.

    Raises:
        ConfigError: CUDA is asked for and absent; there is no device for this rank.
    """
    if choose_device(setting, "learner.device") == "cpu":
        return "cpu"
    place, visible = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if place >= visible:
        raise ConfigError(
            f"LOCAL_RANK is {place}, and this rank sees {visible} CUDA device(s): rank r of a machine takes device r",
            hint="let each rank see the devices of all ranks of its machine in CUDA_VISIBLE_DEVICES, or start fewer",
        )
    return "cuda"


def compute_deterministically() -> None:
    """Has torch give the same bits for the same batches, from now on in this process."""
    # cuBLAS reads it with the first product: one workspace for each stream, so that sums keep their order.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    # Kernels are not chosen by the clock.
    torch.backends.cudnn.benchmark = False


def _peak_tflops(device: DeviceType, param_dtype: str) -> float | None:
    """The peak of this rank's device; None where it is not known."""
    if device == "cpu":
        return None
    return peak_tflops(torch.cuda.get_device_name(int(os.environ.get("LOCAL_RANK", "0"))), param_dtype)
