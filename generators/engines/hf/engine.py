"""The `hf` engine's thread: what other threads ask for is taken up between two decode steps.

Invariants: only the engine's thread touches the model and the running sequences. Other threads put commands into an
inbox and wake it. The thread sleeps only where nothing can be done before another command arrives.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import torch

from generators.engines.base import (
    EngineError,
    EngineStatus,
    FinishReason,
    GenerationRequest,
    GenerationResult,
    InferenceEngine,
    KvPolicy,
    OnFailure,
    OnResults,
    PartialResponse,
    ProbeResult,
    SwapTimings,
)
from generators.engines.hf.checks import check_request, check_tokens
from generators.engines.hf.commands import Abort, Command, Probe, Progress, Submit, Update
from generators.engines.hf.decoder import Decoder
from generators.engines.hf.loading import LoadedModel, load_model
from generators.engines.hf.scheduling import WaitingLine
from generators.engines.hf.swapping import Swapper
from generators.engines.hf.weights import ModelWeights
from mesh.errors import PayloadError, WeightsError
from mesh.versions import PolicyVersion, VersionRuns


class HfEngine(InferenceEngine):
    """Continuous batching over a Hugging Face model's own forward pass.

    Args:
        loaded: the model; its parameters are replaced by `update_weights`.
        slots: sequences decoded together.
        on_results, on_failure: see `InferenceEngine`.
        kv: what becomes of running sequences at a swap.
        seed: of the draws of requests that bring none.
    """

    name = "hf"

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        slots: int,
        on_results: OnResults,
        on_failure: OnFailure,
        kv: KvPolicy = "keep",
        seed: int = 0,
    ) -> None:
        self._loaded = loaded
        self._on_results = on_results
        self._on_failure = on_failure
        self._weights = ModelWeights(loaded.model)
        self._decoder = Decoder(loaded, slots, seed)
        self._line = WaitingLine()
        self._swapper = Swapper(self._weights, self._decoder, self._line, kv)
        self._taken: deque[Command] = deque()
        self._updates: deque[Update] = deque()
        self._swaps = 0
        self._digest = ""
        self._wake = threading.Condition()
        # Guarded by `_wake`:
        self._inbox: deque[Command] = deque()
        self._in_flight: set[str] = set()
        self._stopping = False
        self._failure: EngineError | None = None
        self._thread = threading.Thread(target=self._run, name="hf-engine", daemon=True)

    @classmethod
    def from_folder(
        cls,
        folder: Path,
        *,
        slots: int,
        dtype: str,
        on_results: OnResults,
        on_failure: OnFailure,
        kv: KvPolicy,
        device: str,
        seed: int,
    ) -> HfEngine:
        loaded = load_model(folder, dtype=dtype, device=device)
        return cls(loaded, slots=slots, on_results=on_results, on_failure=on_failure, kv=kv, seed=seed)

    def start(self) -> None:
        self._swapper.start()
        self._thread.start()

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        for request in requests:
            check_request(request, self._loaded)
        with self._wake:
            self._check_running()
            ids: set[str] = set()
            for request in requests:
                if request.request_id in self._in_flight or request.request_id in ids:
                    raise PayloadError("request_id", f"{request.request_id!r} is already in flight")
                ids.add(request.request_id)
            self._in_flight |= ids
            self._inbox.append(Submit(tuple(requests)))
            self._wake.notify_all()

    def abort(self, request_ids: Iterable[str]) -> None:
        with self._wake:
            self._inbox.append(Abort(set(request_ids)))
            self._wake.notify_all()

    def progress(self, at_least: Mapping[str, int]) -> Future[list[PartialResponse]]:
        done: Future[list[PartialResponse]] = Future()
        with self._wake:
            self._check_running()
            self._inbox.append(Progress(dict(at_least), done))
            self._wake.notify_all()
        return done

    def probe(self, token_ids: Sequence[int]) -> Future[ProbeResult]:
        check_tokens(token_ids, self._loaded)
        done: Future[ProbeResult] = Future()
        with self._wake:
            self._check_running()
            self._inbox.append(Probe(tuple(token_ids), done))
            self._wake.notify_all()
        return done

    def update_weights(
        self, version: PolicyVersion, tensors: Iterable[tuple[str, torch.Tensor]], digest: str
    ) -> Future[SwapTimings]:
        done: Future[SwapTimings] = Future()
        self._check_running()
        asked = time.perf_counter()
        try:
            staged = self._weights.stage(tensors)
        except WeightsError as error:
            done.set_exception(error)
            return done
        staged_at = time.perf_counter()
        with self._wake:
            self._check_running()
            self._inbox.append(Update(version, staged, digest, staged_at - asked, staged_at, done))
            self._wake.notify_all()
        return done

    def status(self) -> EngineStatus:
        active = self._decoder.table.active
        failure = self._failure
        return EngineStatus(
            active=active,
            queued=max(0, len(self._in_flight) - active),
            tokens_generated=self._decoder.tokens_generated,
            swaps=self._swaps,
            serving=self._decoder.serving,
            digest=self._digest,
            failure=None if failure is None else str(failure),
        )

    def drain(self, timeout_s: float) -> bool:
        with self._wake:
            return self._wake.wait_for(lambda: not self._in_flight, timeout_s)

    def stop(self) -> None:
        with self._wake:
            self._stopping = True
            self._wake.notify_all()
        if self._thread.is_alive():
            self._thread.join()
        self._swapper.stop()

    def _check_running(self) -> None:
        if self._failure is not None:
            raise EngineError(f"the engine has failed: {self._failure.message}", hint="restart the generator")
        if self._stopping:
            raise EngineError("the engine is stopping", hint="submit to another generator")

    # --- the engine's thread ---

    def _run(self) -> None:
        try:
            with torch.inference_mode():
                while not self._stopping:
                    self._turn()
                self._abandon()
        except Exception as error:  # noqa: BLE001 - whatever the model's code or a callback raises must be reported
            self._fail(error)

    def _turn(self) -> None:
        if self._inbox or not self._has_work():
            self._take_commands()
            if self._stopping:
                return
        pinned = self._decoder.pinned + self._line.pinned if self._updates else 0
        if self._updates and (pinned == 0 or self._decoder.serving is None):
            self._swap(self._updates.popleft())
            return
        if self._decoder.serving is None:
            return
        starting = self._line.take(self._decoder.table.free, pinned_only=bool(self._updates)) if self._line else []
        if starting:
            self._decoder.prefill(self._line.to_prefill(starting))
        self._deliver(self._decoder.step(starting))

    def _has_work(self) -> bool:
        if self._updates:
            return True
        return self._decoder.serving is not None and bool(self._line or self._decoder.table.active)

    def _take_commands(self) -> None:
        with self._wake:
            self._wake.wait_for(lambda: bool(self._inbox) or self._stopping or self._has_work())
            self._taken, self._inbox = self._inbox, deque()
        while self._taken:
            match command := self._taken.popleft():
                case Submit():
                    self._queue(command.requests)
                case Abort():
                    self._deliver(self._withdraw(command.request_ids))
                case Progress():
                    waiting = self._line.progress(command.at_least)
                    _answer(command.done, waiting + self._decoder.table.progress(command.at_least))
                case Probe():
                    self._answer_probe(command)
                case Update():
                    self._updates.append(command)

    def _answer_probe(self, probe: Probe) -> None:
        if not probe.done.set_running_or_notify_cancel():
            return
        serving = self._decoder.serving
        if serving is None:
            probe.done.set_exception(WeightsError("the engine has no weights yet"))
            return
        try:
            log_probs = self._decoder.log_probs(probe.token_ids)
        except (RuntimeError, MemoryError) as error:
            # Long ones need memory that decoding does not: no reason to end what is running.
            probe.done.set_exception(EngineError(f"the probe failed: {error}", hint="probe with fewer tokens"))
            return
        probe.done.set_result(ProbeResult(serving, self._digest, log_probs, self._weights.tensors()))

    def _queue(self, requests: Sequence[GenerationRequest]) -> None:
        """Puts requests in the line; those whose prefix leaves nothing to be sampled end here."""
        complete = [(request, self._decoder.completed(request)) for request in requests if request.prefix is not None]
        results = [_unsampled(request, reason) for request, reason in complete if reason is not None]
        ended = {result.request_id for result in results}
        self._line.add([request for request in requests if request.request_id not in ended] if ended else requests)
        self._deliver(results)

    def _withdraw(self, request_ids: set[str]) -> list[GenerationResult]:
        waiting = [_unsampled(item.request, "aborted") for item in self._line.withdraw(request_ids)]
        return waiting + self._decoder.abort(request_ids)

    def _swap(self, update: Update) -> None:
        if not update.done.set_running_or_notify_cancel():
            return
        begin = time.perf_counter()
        in_flight = self._decoder.table.active
        first = self._decoder.serving is None
        try:
            recompute_s = self._swapper.swap(update.weights)
        except WeightsError as error:
            update.done.set_exception(error)
            return
        self._decoder.served(update.version)
        end = time.perf_counter()
        if first:
            self._decoder.prepare()
        self._swaps += 1
        self._digest = update.digest
        update.done.set_result(
            SwapTimings(
                version=update.version,
                digest=update.digest,
                stage_us=update.staging_s * 1e6,
                wait_us=(begin - update.staged_at) * 1e6,
                pause_us=(end - begin) * 1e6,
                recompute_us=recompute_s * 1e6,
                in_flight=in_flight,
            )
        )

    def _deliver(self, results: list[GenerationResult]) -> None:
        if not results:
            return
        self._on_results(results)
        with self._wake:
            self._in_flight.difference_update(result.request_id for result in results)
            self._wake.notify_all()

    def _abandon(self) -> None:
        """Ends everything in flight, for `stop`."""
        self._take_commands()
        with self._wake:
            ids = set(self._in_flight)
        self._deliver(self._withdraw(ids))
        self._refuse_updates(EngineError("the engine was stopped before the swap"))

    def _fail(self, error: Exception) -> None:
        failure = error if isinstance(error, EngineError) else EngineError(f"{type(error).__name__}: {error}")
        failure.__cause__ = error
        with self._wake:
            self._failure = failure
            self._in_flight.clear()
            commands, self._inbox = self._inbox, deque()
            self._wake.notify_all()
        for command in (*self._taken, *commands):
            if isinstance(command, Progress | Probe):
                _refuse(command.done, failure)
            elif isinstance(command, Update):
                self._updates.append(command)
        self._refuse_updates(failure)
        self._on_failure(failure)

    def _refuse_updates(self, error: EngineError) -> None:
        while self._updates:
            _refuse(self._updates.popleft().done, error)


def _answer(done: Future[Any], value: Any) -> None:
    if done.set_running_or_notify_cancel():
        done.set_result(value)


def _refuse(done: Future[Any], error: EngineError) -> None:
    if done.set_running_or_notify_cancel():
        done.set_exception(error)


def _unsampled(request: GenerationRequest, reason: FinishReason) -> GenerationResult:
    """The result of a request for which nothing was sampled here: what it brought with it."""
    prefix = request.prefix
    return GenerationResult(
        request_id=request.request_id,
        response_ids=prefix.response_ids if prefix else np.zeros(0, np.int32),
        log_probs=prefix.log_probs if prefix else np.zeros(0, np.float32),
        versions=prefix.versions if prefix else VersionRuns(()),
        finish_reason=reason,
    )
