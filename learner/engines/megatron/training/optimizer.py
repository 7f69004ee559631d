"""Megatron's distributed optimizer: AdamW on float32 masters; each data-parallel rank has a range of every bucket."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import ChainedOptimizer, DistributedOptimizer, OptimizerConfig, get_megatron_optimizer
from torch import Tensor, nn

from rollmesh.learner.engines.interface import EngineSpec
from rollmesh.learner.engines.megatron.computing.data_parallel import bucket_groups
from rollmesh.mesh.config.learner import OptimizerSection

MOMENTS = ("exp_avg", "exp_avg_sq")
"""Names of AdamW's moments in its state."""


@dataclass(frozen=True, slots=True, eq=False)
class OwnedRange:
    """The part of a parameter that this process's optimizer updates.

    Attributes:
        parameter: of the model.
        start, stop: elements of the parameter, flattened.
        master: float32 [stop - start]; a view of the parameter where that is float32.
        state: of the optimizer, for this range; empty before the first step.
    """

    parameter: nn.Parameter
    start: int
    stop: int
    master: Tensor
    state: dict[str, Any]

    @property
    def gradient(self) -> Tensor:
        """The range of the accumulated gradient, float32 [stop - start]."""
        whole: Tensor = self.parameter.main_grad  # type: ignore[attr-defined]  # Megatron's name
        return whole.view(-1)[self.start : self.stop]


class MegatronOptimizer:
    """The optimizer of one model.

    Args:
        section: of the configuration.
        spec: of the engine.
        chunks: wrapped.
    """

    def __init__(self, section: OptimizerSection, spec: EngineSpec, chunks: Sequence[DistributedDataParallel]) -> None:
        dtype: torch.dtype = getattr(torch, spec.param_dtype)
        self._section = section
        self._chunks = list(chunks)
        self._overlaps = spec.megatron.overlap_param_gather
        self._inner: ChainedOptimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=section.lr,
                min_lr=0.0,
                weight_decay=section.weight_decay,
                adam_beta1=section.betas[0],
                adam_beta2=section.betas[1],
                adam_eps=section.eps,
                clip_grad=section.max_grad_norm,
                bf16=dtype == torch.bfloat16,
                params_dtype=dtype,
                use_distributed_optimizer=True,
                overlap_param_gather=spec.megatron.overlap_param_gather,
            ),
            self._chunks,
            use_gloo_process_groups=False,
        )
        for part in self.parts:
            if not _counts_by_group(part.optimizer):
                for group in part.optimizer.param_groups:
                    # Else torch reads and writes all memory several times.
                    group["fused"] = True

    @property
    def parts(self) -> list[DistributedOptimizer]:
        """Optimizers of dense parameters and of experts that have something to update here."""
        return [part for part in self._inner.chained_optimizers if not part.is_stub_optimizer]

    def gradient_norm(self) -> float:
        """Hands the gradients to the masters, and gives the norm over the whole model; collective."""
        self._inner.prepare_grads()
        return float(self._inner.get_grad_norm())

    def step(self, rate: float, norm: float) -> None:
        """Takes a step; collective.

        Args:
            rate: learning rate.
            norm: of the gradient, before clipping.
        """
        for part in self.parts:
            for group in part.param_groups:
                group["lr"] = rate
                group["weight_decay"] = self._section.weight_decay * group["wd_mult"]
            gradients = [master.grad for master in part.get_parameters() if master.grad is not None]
            if norm > self._section.max_grad_norm and gradients:
                torch._foreach_mul_(gradients, self._section.max_grad_norm / (norm + 1e-6))
        self._inner.step_with_ready_grads()
        if self._overlaps:
            # Megatron would wait for the next forward pass, and forget it where one came amid the step.
            for group in self._groups():
                group.param_gather_dispatched = False
                group.start_param_sync()

    def wait_for_parameters(self) -> None:
        """Waits for parameters that still travel; a forward pass waits by itself, layer by layer."""
        for group in self._groups():
            if group.param_gather_handle is not None:
                group.param_gather_handle.wait()
                group.param_gather_handle = None

    def release_gradients(self) -> None:
        """Frees the masters' copies of gradients."""
        self._inner.zero_grad()

    def parameters_from_masters(self) -> None:
        """Gives masters that have been filled to the parameters of all data-parallel ranks; collective."""
        for part in self.parts:
            part._copy_main_params_to_model_params()
        self.wait_for_parameters()
        for chunk in self._chunks:
            chunk.start_param_sync(force_sync=True)

    def ranges(self) -> Iterator[OwnedRange]:
        """This process's parts of the masters."""
        for part in self.parts:
            # Megatron's own index of these counts wrong where a group has parameters of several dtypes.
            models = [*part.model_fp32_groups, *part.model_float16_groups]
            masters = [*part.shard_fp32_groups, *part.shard_fp32_from_float16_groups]
            for parameters, shards in zip(models, masters, strict=True):
                for parameter, master in zip(parameters, shards, strict=True):
                    owned = part._get_model_param_range_map(parameter)["param"]
                    yield OwnedRange(parameter, owned.start, owned.end, master, part.optimizer.state[master])

    def _groups(self) -> Iterator[Any]:
        return (group for chunk in self._chunks for group in bucket_groups(chunk))

    def complete(self, steps: int) -> None:
        """Gives moments of no step to ranges that have none, and records how many steps all moments have seen."""
        for owned in self.ranges():
            for name in MOMENTS:
                if name not in owned.state:
                    owned.state[name] = torch.zeros_like(owned.master.detach())
        for part in self.parts:
            for group in part.optimizer.param_groups:
                # Transformer Engine counts by group, torch by parameter.
                if _counts_by_group(part.optimizer):
                    group["step"] = steps
                    continue
                for master in group["params"]:
                    part.optimizer.state[master]["step"] = torch.tensor(float(steps))

    def states(self) -> Iterator[Tensor]:
        """Memory of the optimizer's state as it is, and of masters that are not the parameters themselves."""
        for owned in self.ranges():
            yield from (owned.state[name] for name in MOMENTS if name in owned.state)
            if owned.parameter.dtype != owned.master.dtype:
                yield owned.master


def _counts_by_group(optimizer: Any) -> bool:
    return not isinstance(optimizer, torch.optim.AdamW)
