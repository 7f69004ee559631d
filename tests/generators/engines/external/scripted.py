"""A backend in this very process: a model of one table, decoded step by step in the event loop.

It does what a foreign engine does: a queue and a batch of its own, stamps, pauses, memory that it releases. It insists
on what `Backend` promises to it, and fails where a test says so.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from rollmesh.generators.engines.external.backend import Backend, DecodeChunk, DecodeJob, LoadMetrics
from rollmesh.generators.engines.request_validation import RequestLimits
from rollmesh.generators.engines.stop_strings import StopMatcher
from rollmesh.generators.engines.types import SleepLevel, SleepReport, WakeStep
from rollmesh.mesh.errors import WeightsError
from rollmesh.mesh.liveness.freeze_detector import ProcessState, ThreadState
from tests.generators.engines import tiny

Weights = dict[str, torch.Tensor]


def log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    """Over the last axis."""
    shifted = logits - logits.max(-1, keepdims=True)
    found: NDArray[np.float32] = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return found


class TableModel:
    """Logits of the next token by the last one: a table, times a factor per token."""

    table, factor = "model.table.weight", "model.layernorm.weight"

    def __init__(self, vocabulary: int) -> None:
        self.shapes = {self.table: (vocabulary, vocabulary), self.factor: (vocabulary,)}

    def random_weights(self, seed: int) -> Weights:
        """Under which sequences vary and seldom end."""
        draws = torch.Generator().manual_seed(seed)
        weights = {name: torch.randn(shape, generator=draws) * 2 for name, shape in self.shapes.items()}
        # Special tokens have no text that stop strings are looked for in.
        weights[self.table][:, : tiny.EOS_2 + 1] = -8.0
        weights[self.factor].abs_().clamp_(min=0.5)
        return weights

    def constant_weights(self, token: int) -> Weights:
        """Under which every token drawn is `token`."""
        weights = {name: torch.zeros(shape) for name, shape in self.shapes.items()}
        weights[self.factor] += 1
        weights[self.table][:, token] = 100.0
        return weights

    def logits(self, weights: Weights, ids: Sequence[int]) -> torch.Tensor:
        """Float32 [len(ids), vocabulary]."""
        return weights[self.table][list(ids)] * weights[self.factor]


@dataclass(eq=False)
class Sampling:
    """A job and what it has sampled."""

    job: DecodeJob
    take: Callable[[DecodeChunk], None]
    draws: np.random.Generator
    matcher: StopMatcher | None
    last: int
    count: int = 0
    ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    runs: list[tuple[int, str]] = field(default_factory=list)
    over: asyncio.Event = field(default_factory=asyncio.Event)
    error: Exception | None = None


class ScriptedBackend(Backend):
    """See above.

    Args:
        model: whose weights it takes.
        limits: of the model.
        tokenizer: for stop strings.
        slots: sequences in its batch.
        stride: tokens per chunk.

    Attributes:
        hooks: operation -> what happens when it is called; a hook may raise, or return something to be awaited.
        at_job: sees each job as it comes, and may raise.
        relabel: what becomes of the label of a token.
        calls: operations so far, in order.
        jobs: all, in the order in which they came.
        start_limit: jobs that it had at once.
        staged: sets of weights that were neither loaded nor discarded.
        does: what its processes do.
        raised: what they have raised last.
        recomputed: the last load asked for new keys and values; None before.
    """

    def __init__(
        self, model: TableModel, limits: RequestLimits, tokenizer: PreTrainedTokenizerBase, slots: int, stride: int = 1
    ) -> None:
        self._model = model
        self._limits = limits
        self._tokenizer = tokenizer
        self._slots = slots
        self._stride = stride
        self._jobs: dict[str, Sampling] = {}
        self._weights: NDArray[np.float32] | None = None
        self._label = ""
        self._paused = self._asleep = self._deeply = self._ended = False
        self._changed = asyncio.Event()
        self._decoding: asyncio.Task[None] | None = None
        self._fresh = np.random.default_rng(0)
        self.on_death: Callable[[str], None] = lambda _: None
        self.hooks: dict[str, Callable[[], Any]] = {}
        self.raised = ""
        self.at_job: Callable[[DecodeJob], None] = lambda _: None
        self.relabel: Callable[[str], str] = lambda label: label
        self.calls: list[str] = []
        self.jobs: list[DecodeJob] = []
        self.start_limit = 0
        self.staged = 0
        self.does = ThreadState.ASLEEP
        self.recomputed: bool | None = None

    async def start(self, on_death: Callable[[str], None]) -> RequestLimits:
        self.on_death = on_death
        await self._called("start")
        self._decoding = asyncio.get_running_loop().create_task(self._decode())
        return self._limits

    async def generate(self, job: DecodeJob, take: Callable[[DecodeChunk], None]) -> None:
        assert job.job_id not in self._jobs
        assert not self._paused, "a job while paused"
        assert 0 < len(job.token_ids) < self._limits.context
        assert 0 < job.sampling.max_tokens <= self._limits.context - len(job.token_ids)
        await self._called("generate")
        self.jobs.append(job)
        self.at_job(job)
        seed, stop = job.sampling.seed, job.sampling.stop
        draws = np.random.default_rng(seed) if seed else self._fresh.spawn(1)[0]
        matcher = StopMatcher(self._tokenizer, stop) if stop else None
        sequence = self._jobs[job.job_id] = Sampling(job, take, draws, matcher, job.token_ids[-1])
        self.start_limit = max(self.start_limit, len(self._jobs))
        self._changed.set()
        try:
            await sequence.over.wait()
        finally:
            self._jobs.pop(job.job_id, None)
        if sequence.error is not None:
            raise sequence.error

    def fail_all(self, error: Exception) -> None:
        """Every job that it has fails with this."""
        for sequence in self._jobs.values():
            sequence.error = error
            sequence.over.set()

    async def abort(self, job_ids: Iterable[str]) -> None:
        await self._called("abort")
        for job_id in job_ids:
            if job_id in self._jobs:
                self._emit(self._jobs[job_id], "aborted")

    async def pause(self) -> None:
        await self._called("pause")
        assert not self._paused
        self._paused = True
        for sampling in self._jobs.values():
            if sampling.ids:
                self._emit(sampling, None)

    async def resume(self) -> None:
        await self._called("resume")
        assert self._paused
        assert not self._asleep
        assert self._weights is not None
        self._paused = False
        self._changed.set()

    def stage(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Weights:
        assert "start" in self.calls
        staged = {name: tensor.clone() for name, tensor in tensors}
        for name, shape in self._model.shapes.items():
            if name not in staged:
                raise WeightsError(f"{name} is missing")
            if staged[name].shape != shape:
                raise WeightsError(f"{name} has shape {tuple(staged[name].shape)}")
        if len(staged) > len(self._model.shapes):
            raise WeightsError("unknown tensors")
        self.staged += 1
        return staged

    async def load(self, staged: Weights, label: str, *, recompute: bool) -> None:
        assert self._paused
        self.staged -= 1
        self.recomputed = recompute
        await self._called("load")
        self._weights = (staged[self._model.table] * staged[self._model.factor]).numpy()
        self._label, self._deeply = label, False

    def discard(self, staged: Weights) -> None:
        self.staged -= 1

    async def log_probs(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        await self._called("log_probs")
        assert not self._paused
        assert self._weights is not None
        every = log_softmax(self._weights[list(token_ids[:-1])])
        return every[np.arange(len(token_ids) - 1), list(token_ids[1:])]

    async def sleep(self, level: SleepLevel) -> SleepReport:
        await self._called("sleep")
        assert self._paused
        assert not self._deeply, "it is as deep asleep as can be"
        assert not self._jobs, "it was put to sleep with jobs"
        self._asleep = True
        self._deeply = level >= SleepLevel.WITHOUT_WEIGHTS
        if self._deeply:
            self._weights = None
        return SleepReport(1 << 20, 0.0)

    async def wake(self, step: WakeStep) -> None:
        await self._called("wake")
        assert self._asleep
        self._asleep, self._deeply = step < WakeStep.KV_CACHE, False

    async def ping(self) -> None:
        await self._called("ping")

    def process_state(self) -> ProcessState:
        return ProcessState(self.does, {})

    def last_error(self) -> str:
        return self.raised

    def load_metrics(self) -> LoadMetrics:
        return LoadMetrics(min(len(self._jobs), self._slots), max(0, len(self._jobs) - self._slots), 0.5, 3)

    async def stop(self) -> None:
        await self._called("stop")
        self._ended = True
        if self._decoding is not None:
            self._decoding.cancel()

    async def _called(self, operation: str) -> None:
        self.calls.append(operation)
        hook = self.hooks.get(operation)
        if hook is not None and (outcome := hook()) is not None:
            await outcome

    async def _decode(self) -> None:
        while True:
            batch = list(self._jobs.values())[: self._slots]
            if self._paused or self._weights is None or not batch:
                self._changed.clear()
                await self._changed.wait()
                continue
            for sequence in batch:
                if not sequence.over.is_set():
                    self._step(sequence, self._weights)
            await asyncio.sleep(0)

    def _step(self, sequence: Sampling, weights: NDArray[np.float32]) -> None:
        sampling = sequence.job.sampling
        token, log_prob = draw(weights[sequence.last], sampling, sequence.draws)
        sequence.last = token
        sequence.count += 1
        sequence.ids.append(token)
        sequence.log_probs.append(log_prob)
        sequence.runs.append((1, self.relabel(self._label)))
        if token in self._limits.eos or (sequence.matcher is not None and sequence.matcher.push([token])):
            self._emit(sequence, "stop")
        elif sequence.count == sampling.max_tokens:
            self._emit(sequence, "length")
        elif len(sequence.ids) == self._stride:
            self._emit(sequence, None)

    def _emit(self, sequence: Sampling, finish: Any) -> None:
        if finish is not None:
            if sequence.over.is_set():
                return
            sequence.over.set()
        chunk = DecodeChunk(sequence.ids, sequence.log_probs, sequence.runs, finish)
        sequence.ids, sequence.log_probs, sequence.runs = [], [], []
        sequence.take(chunk)


def draw(logits: NDArray[np.float32], sampling: Any, draws: np.random.Generator) -> tuple[int, float]:
    """One token and its log-prob under the distribution it was drawn from."""
    if sampling.temperature == 0:
        token = int(logits.argmax())
        return token, float(log_softmax(logits)[token])
    kept = logits / np.float32(sampling.temperature)
    if sampling.top_k:
        kept = np.where(kept >= np.sort(kept)[-sampling.top_k], kept, -np.inf)
    if sampling.top_p < 1:
        order = np.argsort(-kept)
        mass = np.exp(log_softmax(kept)[order]).cumsum()
        kept = kept.copy()
        kept[order[1:][mass[:-1] >= sampling.top_p]] = -np.inf
    every = log_softmax(kept)
    sums = np.exp(every).cumsum()
    token = int(min(np.searchsorted(sums, draws.random() * sums[-1]), len(sums) - 1))
    return token, float(every[token])
