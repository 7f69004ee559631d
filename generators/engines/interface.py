"""The interface of inference engines.

Invariants every engine keeps (the contract suite in `tests/generators/engines/contract.py` checks them):

- Every accepted request ends in exactly one `GenerationResult`, delivered through `on_results`; or else the engine has
  failed as a whole and reported it through `on_failure`.
- The events of a streamed request, concatenated, are its result, and come before it.
- A sampled token carries the version of the weights whose forward pass produced its logits.
- Tokens that a request brings with it (`prefix`) stand in its result as they came, and are never sampled again.
- Weights change between two decode steps only, all tensors at once, and never while a pinned request is running. Where
  they are adapters that the engine computes with, a response may keep that under which it began.
  A swap that fails, wherever it fails, leaves the former weights in service, whole.
- A bad request or a bad set of weights is refused by a typed error and changes nothing.
- A request at which the engine itself fails is tried twice, then ends alone, refused; no other request is disturbed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, ClassVar, Protocol

from rollmesh.generators.engines.adapters import WeightSet
from rollmesh.generators.engines.errors import EngineError
from rollmesh.generators.engines.types import (
    EngineSettings,
    EngineStatus,
    GenerationRequest,
    GenerationResult,
    PartialResponse,
    ProbeResult,
    ServedWeights,
    SleepLevel,
    SleepReport,
    SwapTimings,
    TokenEvent,
    WakeStep,
)
from rollmesh.mesh.liveness.freeze_detector import ProcessState
from rollmesh.mesh.trajectory.versions import PolicyVersion


class EngineListener(Protocol):
    """Receives an engine's results, events and failures.

    Called from the engine's own thread: the methods must be quick, must not raise, and must not wait for the engine.
    """

    def on_results(self, results: list[GenerationResult]) -> None:
        """Requests that have ended."""
        ...

    def on_tokens(self, events: list[TokenEvent]) -> None:
        """New tokens of streamed requests since the last call."""
        ...

    def on_failure(self, error: EngineError) -> None:
        """The engine has failed as a whole; nothing follows."""
        ...


class InferenceEngine(ABC):
    """Continuous batching over one copy of the model. All methods may be called from any thread."""

    name: ClassVar[str]
    takes_grammars: ClassVar[bool] = False
    """Whether it takes `SamplingParams.grammar`."""
    resumes_grammars: ClassVar[bool] = False
    """Whether such a response can continue after tokens that are there.

    Else it takes no prefix and streams no tokens, and an interrupted one is drawn again."""

    @classmethod
    @abstractmethod
    def from_folder(cls, folder: Path, settings: EngineSettings, listener: EngineListener) -> InferenceEngine:
        """See `generators.engines.create_engine`."""

    @abstractmethod
    def start(self) -> None:
        """Starts the engine's thread. Requests wait until the first weights have arrived."""

    @abstractmethod
    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Queues requests, all or none.

        Raises:
            PayloadError: a request is malformed or longer than the model's context; names the field and the limit.
            EngineError: the engine is not running.
        """

    @abstractmethod
    def abort(self, request_ids: Iterable[str]) -> None:
        """Ends requests early; each still gets its result (`aborted`, with the tokens so far). Unknown ids: ignored."""

    @abstractmethod
    def progress(self, at_least: Mapping[str, int]) -> Future[list[PartialResponse]]:
        """Copies the tokens of running responses, between two decode steps.

        It costs nothing until it is called, and then only the copies.

        Args:
            at_least: request id -> tokens below which its response is left out.

        Returns:
            A future of the responses that are running and have that many tokens, in no order. Ids that are unknown,
            finished or waiting for their first slot are left out. It fails with EngineError where the engine does.

        Raises:
            EngineError: the engine is not running.
        """

    @abstractmethod
    def update_weights(self, version: PolicyVersion, weights: WeightSet | None, digest: str) -> Future[SwapTimings]:
        """Swaps the weights between two decode steps.

        The call itself checks the tensors, and copies those with another dtype or device than the engine's. Decoding
        continues meanwhile. The call takes as long as the copies: not for an event loop's thread.

        Args:
            version: name of the new weights; every token drawn after the swap carries it.
            weights: (Hugging Face name, tensor) of all parameters; tied ones at least once. Their memory must never be
                written to again: an engine may serve from it. Or an adapter, where `EngineSettings.adapters` is
                set: responses that are running may finish under their own, and their tokens carry its version. None:
                those in service have this digest, and get another version alone. Keys, values and prefixes stay, and
                responses that are running may carry either version.
            digest: manifest digest, reported back.

        Returns:
            A future. It waits for pinned requests (only such start meanwhile), and may be cancelled for as long as it
            waits. It fails with WeightsError where a tensor is missing, unknown or of another shape, or where there is
            no memory for it. It fails too where there are no tensors, and other weights are in service. Those in
            service stay in use then.

        Raises:
            EngineError: the engine is not running.
        """

    @abstractmethod
    def pause(self) -> Future[None]:
        """Stops decoding between two steps; running sequences stay as they are. A second call does nothing.

        Weights can be swapped, requests submitted, aborted and copied meanwhile; a swap does not resume.

        Raises:
            EngineError: the engine is not running.
        """

    @abstractmethod
    def resume(self) -> Future[None]:
        """Continues after `pause` or `wake`; where nothing is paused it does nothing.

        Returns:
            A future; it fails with EngineError where the engine is asleep (`wake` it).

        Raises:
            EngineError: the engine is not running.
        """

    @abstractmethod
    def sleep(self, level: SleepLevel = SleepLevel.WITHOUT_KV_CACHE) -> Future[SleepReport]:
        """Pauses, and gives memory of its device back.

        Running sequences keep their tokens, and are prefilled again after `wake`. Requests can be submitted, aborted
        and copied, and weights swapped, meanwhile. An engine that is asleep may be put to a deeper sleep.

        Args:
            level: with `WITHOUT_KV_CACHE` the weights stay, in host memory. With `WITHOUT_WEIGHTS` they are dropped,
                and the next `update_weights`, before or after `wake`, has to bring them. Pinned requests cannot be
                answered any more then: they end as aborted.

        Raises:
            EngineError: the engine is not running.
        """

    @abstractmethod
    def wake(self, step: WakeStep = WakeStep.KV_CACHE) -> Future[None]:
        """Takes its memory again; one that is not asleep stays as it is.

        After `WakeStep.WEIGHTS` it is still asleep, and weights that come are put on its device. After
        `WakeStep.KV_CACHE` it is paused: `resume` continues, with the weights it kept or the next ones it is given.

        Raises:
            EngineError: the engine is not running.
        """

    @abstractmethod
    def probe(self, token_ids: Sequence[int]) -> Future[ProbeResult]:
        """Runs tokens through the model between two decode steps, to check the weights in service.

        Args:
            token_ids: at least two, no more than the model's context.

        Returns:
            A future. It fails with WeightsError where there are no weights, and with EngineError where the tokens
            cannot be run (also while the engine is asleep). A failure changes nothing for others.

        Raises:
            PayloadError: tokens that the model cannot take; names the limit.
            EngineError: the engine is not running.
        """

    @abstractmethod
    def weights(self) -> Future[ServedWeights]:
        """The weights in service as they are in the engine, also while it is paused or asleep.

        Returns:
            A future; it fails with WeightsError where there are none.

        Raises:
            EngineError: the engine is not running.
        """

    @abstractmethod
    def status(self) -> EngineStatus:
        """A snapshot; never blocks for a decode step."""

    @abstractmethod
    def ping(self) -> Future[Any]:
        """Asks the decoding thread or processes for an answer, which comes between two decode steps, paused or not.

        Returns:
            A future; it may take as long as a step, a swap, or a compilation.

        Raises:
            EngineError: the engine is not running.
        """

    @abstractmethod
    def process_state(self) -> ProcessState | None:
        """Reads the state of the processes, or the thread, that decode; None before they are ready, or if unknown."""

    @abstractmethod
    def drain(self, timeout_s: float) -> bool:
        """Waits until nothing is queued or active; False where `timeout_s` ran out first."""

    @abstractmethod
    def stop(self) -> None:
        """Aborts the remaining requests (results are delivered), then ends the thread. May be called twice."""
