"""The FSDP2 engine.

Invariants: gradients are sums of the micro-batches' shares over all ranks (FSDP averages, so shares are multiplied by
the number of ranks); all ranks run the same number of micro-batches, short ones fill up with a share of zero; a step
whose gradient is not finite changes nothing.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from learner.algorithms.metrics import Metrics, summarize
from learner.algorithms.types import GlobalCounts
from learner.batching.pack import pack
from learner.batching.types import PackedBatch, TrainSequence
from learner.engines.base import Engine, EngineSpec, LossFunction, StepResult
from learner.engines.fsdp2.layout import build_layout
from learner.engines.fsdp2.loading import load_model, load_tokenizer
from learner.engines.fsdp2.logprobs import token_log_probs
from learner.engines.fsdp2.schedule import learning_rate
from learner.engines.fsdp2.sharding import plain_name, prepare
from learner.engines.fsdp2.state import load_state, save_state
from learner.engines.fsdp2.varlen import build_varlen_layout, has_varlen
from learner.engines.fsdp2.world import World


class Fsdp2Engine(Engine):
    """A causal language model under AdamW, sharded over the ranks where there are several."""

    def __init__(self, spec: EngineSpec) -> None:
        self._spec = spec
        self._param_dtype: torch.dtype = getattr(torch, spec.param_dtype)
        shard_alone = self._param_dtype != torch.float32
        self._world = World(spec.device, need_group=shard_alone)
        self.rank, self.world_size, self.device = self._world.rank, self._world.size, self._world.device
        torch.manual_seed(spec.seed)
        self._model = load_model(spec.model)
        nn.Module.to(self._model, self.device)
        prepare(
            self._model,
            shard=self.world_size > 1 or shard_alone,
            param_dtype=self._param_dtype,
            recompute=spec.activation_checkpointing,
        )
        self._parameters = [p for p in self._model.parameters() if p.requires_grad]
        section = spec.optimizer
        self._optimizer = torch.optim.AdamW(
            self._parameters,
            lr=section.lr,
            betas=section.betas,
            eps=section.eps,
            weight_decay=section.weight_decay,
            fused=True,
        )
        self._steps = 0
        self._varlen = has_varlen(self.device, self._param_dtype)

    def train_batch(
        self,
        batches: Sequence[PackedBatch],
        loss: LossFunction,
        counts: GlobalCounts,
        before_update: Callable[[], None] | None = None,
    ) -> StepResult:
        self._optimizer.zero_grad()
        parts: list[Metrics] = []
        value = torch.zeros((), device=self.device)
        for batch, real in self._even(batches):
            log_probs, entropies = self._forward(batch)
            output = loss(log_probs, entropies, batch.tokens, counts)
            share = output.loss if real else log_probs.sum() * 0.0
            (share * self.world_size).backward()
            value += share.detach()
            parts.append(output.metrics.scaled(float(real)))
        if before_update is not None:
            before_update()
        if not counts.tokens:
            return StepResult({}, skipped=True)
        if not parts:
            # Nothing had an advantage on any rank: a gradient of zero, which the optimizer's moments still follow.
            for parameter in self._parameters:
                parameter.grad = torch.zeros_like(parameter)
        norm = self._clip()
        rate = learning_rate(self._spec.optimizer, self._steps, self._spec.total_steps)
        skipped = not np.isfinite(norm)
        if not skipped:
            for group in self._optimizer.param_groups:
                group["lr"] = rate
            self._optimizer.step()
            self._steps += 1
        return StepResult(self._figures(parts, batches, value) | {"grad_norm": norm, "lr": rate}, skipped)

    @torch.no_grad()
    def infer_batch(self, batches: Sequence[PackedBatch]) -> list[Tensor]:
        results: list[Tensor] = []
        for batch, real in self._even(batches):
            log_probs, _ = self._forward(batch)
            if real:
                results.append(log_probs)
        empty = [torch.zeros(0, device=self.device) for batch in batches if not batch.tokens.num_tokens]
        if not empty:
            return results
        filled = iter(results)
        return [next(filled) if batch.tokens.num_tokens else empty[0] for batch in batches]

    def global_counts(self, batches: Sequence[PackedBatch]) -> GlobalCounts:
        counts = sum((batch.counts for batch in batches), GlobalCounts(0, 0))
        return GlobalCounts(*self._world.sum_ints((counts.tokens, counts.sequences)))

    def export_weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        wanted = dtype or getattr(torch, self._spec.model.dtype)
        for name, tensor in self._named_tensors():
            full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            full = full.detach().to("cpu", wanted if full.is_floating_point() else full.dtype)
            yield name, full.contiguous()

    def save_checkpoint(self, folder: Path, extra: dict[str, object]) -> None:
        save_state(folder, self._world, self._model, self._optimizer, self._steps, extra)

    def load_checkpoint(self, folder: Path) -> dict[str, object]:
        self._steps, extra = load_state(folder, self._world, self._model, self._optimizer)
        return extra

    def barrier(self) -> None:
        self._world.barrier()

    def export_hf(self, folder: Path) -> None:
        state = {name: tensor.clone() for name, tensor in self.export_weights()}
        if self.rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            self._model.config.dtype = getattr(torch, self._spec.model.dtype)
            self._model.save_pretrained(folder, state_dict=state)
            tokenizer = load_tokenizer(self._spec.model)
            if tokenizer is not None:
                tokenizer.save_pretrained(folder)
        self._world.barrier()

    def offload(self) -> None:
        self._move(torch.device("cpu"))

    def onload(self) -> None:
        self._move(self.device)

    def close(self) -> None:
        # The sharded model refers to the process group, whose threads end only with the last reference: it goes first.
        self._parameters = []
        del self._model, self._optimizer
        gc.collect()
        self._world.close()

    def _forward(self, batch: PackedBatch) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies of the trained tokens, float32 [R]."""
        build = build_varlen_layout if self._varlen else build_layout
        logits = self._model(
            input_ids=batch.input_ids,
            position_ids=batch.position_ids,
            use_cache=False,
            logits_to_keep=batch.predictors,
            layout=build(batch.segments, self.device),
        ).logits.squeeze(0)
        return token_log_probs(logits, batch.labels, batch.temperatures)

    def _even(self, batches: Sequence[PackedBatch]) -> list[tuple[PackedBatch, bool]]:
        """Micro-batches with trained tokens, filled up to the same number on every rank; False marks the filling."""
        real = [(batch, True) for batch in batches if batch.tokens.num_tokens]
        # Agreed on before the first forward pass, whose own collectives must line up between ranks.
        missing = self._world.max_int(len(real)) - len(real)
        return real + [(_filling(self.device), False) for _ in range(missing)]

    def _figures(self, parts: Sequence[Metrics], batches: Sequence[PackedBatch], loss: Tensor) -> dict[str, float]:
        """Loss and metrics over all micro-batches and ranks."""
        figures = {"loss": float(self._world.sum(loss))}
        if not parts:
            return figures
        seen = sum(batch.tokens.num_tokens for batch in batches)
        reduce = {"reduce_sum": self._world.sum, "reduce_max": self._world.max} if self.world_size > 1 else {}
        return figures | summarize(parts, seen, **reduce)

    def _clip(self) -> float:
        """Clips the gradient to the section's global norm; gives the norm before."""
        norm = torch.nn.utils.clip_grad_norm_(self._parameters, self._spec.optimizer.max_grad_norm)
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    def _named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Parameters, tied ones once, and buffers that belong to the model's state."""
        saved = self._model.state_dict().keys()
        yield from ((plain_name(name), tensor) for name, tensor in self._model.named_parameters())
        yield from ((plain_name(name), tensor) for name, tensor in self._model.named_buffers() if name in saved)

    def _move(self, device: torch.device) -> None:
        nn.Module.to(self._model, device)
        for state in self._optimizer.state.values():
            for key, value in state.items():
                if isinstance(value, Tensor):
                    state[key] = value.to(device)


def _filling(device: torch.device) -> PackedBatch:
    one = np.zeros(1, dtype=np.int32)
    sequence = TrainSequence(one, one, np.ones(1, dtype=np.uint8), np.zeros(1, dtype=np.float32))
    return pack([sequence], device=device)
