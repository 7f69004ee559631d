"""One request in flight: the tokens that it brought, and those that its jobs have sampled since.

A response may take several jobs: each continues after the tokens that there are. Work per chunk is a few list
operations; arrays are made on request.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from rollmesh.generators.engines.errors import EngineError
from rollmesh.generators.engines.external.backend import DecodeChunk, DecodeJob
from rollmesh.generators.engines.external.boundary_stops import BoundaryStopMatcher, boundary_matcher
from rollmesh.generators.engines.external.model_info import ModelInfo
from rollmesh.generators.engines.external.version_labels import VersionLabels, first_runs
from rollmesh.generators.engines.stop_strings import StopMatcher
from rollmesh.generators.engines.types import (
    FinishReason,
    GenerationRequest,
    GenerationResult,
    PartialResponse,
    TokenEvent,
)
from rollmesh.mesh.trajectory.payload_codec import Trajectory
from rollmesh.mesh.trajectory.routing import ROUTED_EXPERTS
from rollmesh.mesh.trajectory.seeds import derived_seed
from rollmesh.mesh.trajectory.versions import PolicyVersion, VersionRuns


class RequestState:
    """The state of one request.

    Args:
        request: as submitted, checked.
        model: that answers it.

    Attributes:
        request: as submitted.
        prompt_tokens: of its prompt as the model sees it; corrected when its images have been read.
        ids: tokens of the response so far.
        started: monotonic time of its first job; None before.
        job_id: of the job that is sampling it; None while it waits.
        finish: why it ended; None while it has not.
        refusal: why the engine refuses the request; empty where it does not.
        failures: jobs of it at which the engine failed.
    """

    __slots__ = (
        "_boundary",
        "_label",
        "_lengths",
        "_log_probs",
        "_model",
        "_order",
        "_prefix_length",
        "_routed_experts",
        "_streamed",
        "_versions",
        "failures",
        "finish",
        "ids",
        "job_id",
        "prompt_tokens",
        "refusal",
        "request",
        "started",
    )

    def __init__(self, request: GenerationRequest, model: ModelInfo) -> None:
        prefix = request.prefix
        self.request = request
        self.prompt_tokens = len(request.prompt_ids)
        self.ids: list[int] = [] if prefix is None else prefix.response_ids.tolist()
        self.started: float | None = None
        self.job_id: str | None = None
        self.finish: FinishReason | None = None
        self.refusal = ""
        self.failures = 0
        self._model = model
        self._log_probs: list[float] = [] if prefix is None else prefix.log_probs.tolist()
        self._lengths = [] if prefix is None else [length for length, _ in prefix.versions.runs]
        self._versions = [] if prefix is None else [version for _, version in prefix.versions.runs]
        self._prefix_length = self._streamed = len(self.ids)
        self._label = ""
        self._order = 0
        self._boundary: BoundaryStopMatcher | None = None
        self._routed_experts: NDArray[np.generic] | None = None

    @property
    def has_sampled(self) -> bool:
        """True where a token was sampled here."""
        return len(self.ids) > self._prefix_length

    @property
    def limit(self) -> int:
        """Most tokens of the whole response."""
        return min(self.request.sampling.max_tokens, self._model.limits.context - self.prompt_tokens)

    def finish_reason(self) -> FinishReason | None:
        """The reason why nothing is left to be sampled after the tokens so far; None where something is.

        Stop strings are looked for in what was brought alone: in the rest the engine has looked.
        """
        if not self.ids:
            return None
        turn, stop, tokenizer = self._current_turn(), self.request.sampling.stop, self._model.tokenizer
        if turn and turn[-1] in self._model.limits.eos:
            return "stop"
        if turn and stop and not self.has_sampled and tokenizer is not None and StopMatcher(tokenizer, stop).push(turn):
            return "stop"
        return "length" if len(self.ids) >= self.limit else None

    def next_job(self, job_id: str) -> DecodeJob:
        """The job that continues after the tokens so far, which leave something to be sampled."""
        if self.request.sampling.grammar:
            # An external engine follows a grammar from its beginning alone.
            self._forget_tokens()
        request, sampling, done = self.request, self.request.sampling, len(self.ids)
        self.job_id = job_id
        if self.started is None:
            self.started = time.monotonic()
        room = self.limit - done
        if room != sampling.max_tokens:
            sampling = replace(sampling, max_tokens=room)
        tokens: Sequence[int] = request.prompt_ids
        if done:
            tokens = [*tokens, *self.ids]
            if sampling.seed:
                # With the seed of the first job the second would repeat its draws.
                sampling = replace(sampling, seed=derived_seed(sampling.seed, done))
            if sampling.stop and self._model.tokenizer is not None:
                self._boundary = boundary_matcher(self._model.tokenizer, sampling.stop, self._current_turn())
        # The digest is that of the prompt without earlier turns.
        seen = "" if request.earlier else request.seen
        return DecodeJob(job_id, tokens, sampling, request.images, seen, len(request.prompt_ids))

    def _forget_tokens(self) -> None:
        self.ids, self._log_probs, self._lengths, self._versions = [], [], [], []
        self._label, self._order = "", 0

    def add(self, chunk: DecodeChunk, labels: VersionLabels) -> int:
        """Adds a chunk of its job.

        Returns:
            Tokens added: all of them, unless one of the first completes a stop string that began before the job. Then
            `finish` is set, and the tokens after that one are left out.

        Raises:
            EngineError: the chunk contradicts itself, or its versions what was loaded.
        """
        ids, log_probs, versions = chunk.token_ids, chunk.log_probs, chunk.versions
        if self._boundary is not None and (match := self._boundary.first_match(ids)) is not None:
            self.finish = "stop"
            ids, log_probs, versions = ids[: match + 1], log_probs[: match + 1], first_runs(versions, match + 1)
        self.ids += ids
        self._log_probs += log_probs
        new, covered = len(ids), 0
        for length, label in versions:
            covered += length
            if label == self._label:
                self._lengths[-1] += length
            elif length:
                self._start_version(length, label, labels)
        if covered != new or len(log_probs) != new:
            raise EngineError(
                f"{len(chunk.token_ids)} tokens came with {len(chunk.log_probs)} log-probs, versions {chunk.versions}"
            )
        if self._boundary is not None and self._boundary.is_past_boundary:
            self._boundary = None
        self._routed_experts = chunk.routed_experts
        return new

    def result(self) -> GenerationResult:
        """The result to deliver; `finish` is set."""
        assert self.finish is not None
        side = {}
        if self._routed_experts is not None:
            side[ROUTED_EXPERTS] = self._routed_experts[: self.prompt_tokens + len(self.ids) - 1]
        return GenerationResult(
            request_id=self.request.request_id,
            sampled=self._sampled(),
            finish_reason=self.finish,
            side=side,
            refusal=self.refusal,
        )

    def partial(self, now: float) -> PartialResponse:
        """A copy of the tokens so far; it has been started."""
        assert self.started is not None
        return PartialResponse(self.request.request_id, self._sampled(), now - self.started)

    def event(self) -> TokenEvent | None:
        """The event with its tokens since the last one; None without new ones."""
        begin, end = self._streamed, len(self.ids)
        if begin == end:
            return None
        self._streamed = end
        runs: list[tuple[int, PolicyVersion]] = []
        missing = end - begin
        for length, version in zip(reversed(self._lengths), reversed(self._versions), strict=True):
            runs.append((min(length, missing), version))
            missing -= runs[-1][0]
            if not missing:
                break
        sampled = Trajectory.sampled(
            np.array(self.ids[begin:], np.int32),
            np.array(self._log_probs[begin:], np.float32),
            VersionRuns(tuple(reversed(runs))),
        )
        return TokenEvent(self.request.request_id, sampled)

    def _start_version(self, length: int, label: str, labels: VersionLabels) -> None:
        """Begins a run of tokens of another version than those before them."""
        order, version = labels[label]
        if order < self._order:
            raise EngineError(f"a response went back from version {self._label!r} to {label!r}")
        if self.request.pinned and self._label:
            raise EngineError(f"a pinned response went from version {self._label!r} to {label!r}")
        self._label, self._order = label, order
        if self._versions and self._versions[-1] == version:
            self._lengths[-1] += length
        else:
            self._lengths.append(length)
            self._versions.append(version)

    def _sampled(self) -> Trajectory:
        return Trajectory(
            response_ids=np.array(self.ids, np.int32),
            log_probs=np.array(self._log_probs, np.float32),
            response_mask=self.request.response_mask(len(self.ids)),
            versions=VersionRuns(tuple(zip(self._lengths, self._versions, strict=True))),
        )

    def _current_turn(self) -> list[int]:
        """The tokens in which an end token or stop string counts: those after the last that was not sampled."""
        prefix = self.request.prefix
        return self.ids if prefix is None else self.ids[len(prefix) - len(prefix.last_turn) :]
