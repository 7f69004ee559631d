"""Control of one generator over gRPC: status, sleep, drain, and a prompt by hand."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from rollmesh.generators.engines.interface import InferenceEngine
from rollmesh.generators.engines.types import EngineStatus, GenerationRequest, GenerationResult
from rollmesh.generators.placement.device_turns import DeviceTurns
from rollmesh.generators.rollout.active_group import sampling_of
from rollmesh.generators.rollout.encoding import FINISH_REASONS
from rollmesh.generators.tokenizer import TokenizerCodec
from rollmesh.generators.weights.announced_weights import AnnouncedWeights
from rollmesh.mesh.errors import PayloadError, UnreachableError
from rollmesh.mesh.runtime.service import Shutdown
from rollmesh.mesh.trajectory.versions import PolicyVersion
from rollmesh.protos import generator_pb2, generator_pb2_grpc, trajectory_pb2

SERVICE_NAME = generator_pb2.DESCRIPTOR.services_by_name["GeneratorControl"].full_name
_PREFIX = "manual-"
# A caller may set no deadline, and a generator may be asleep for long.
_MANUAL_S = 1800.0
# Names of differing tensors that an answer holds.
_DIFFERING = 8


class ManualRequests:
    """Answers prompts outside any group, each to its caller."""

    def __init__(self, engine: InferenceEngine, text: TokenizerCodec) -> None:
        self._engine = engine
        self._waiting: dict[str, asyncio.Future[GenerationResult]] = {}
        self._ids = itertools.count()
        self.text = text

    async def generate(self, prompt_ids: Sequence[int], sampling: trajectory_pb2.SamplingParams) -> GenerationResult:
        """Generates one response; aborts it if the caller disconnects.

        Raises:
            PayloadError: the engine refuses the prompt.
        """
        request_id = f"{_PREFIX}{next(self._ids)}"
        answer: asyncio.Future[GenerationResult] = asyncio.get_running_loop().create_future()
        self._waiting[request_id] = answer
        try:
            self._engine.submit(
                [GenerationRequest(request_id, prompt_ids, sampling_of(sampling, seed=sampling.seed), outside=True)]
            )
            return await answer
        finally:
            if self._waiting.pop(request_id, None) is not None and not answer.done():
                self._engine.abort([request_id])

    def accept_results(self, results: Sequence[GenerationResult]) -> list[GenerationResult]:
        """Answers waiting callers and returns the results that are not theirs."""
        if not self._waiting:
            return list(results)
        others = []
        for result in results:
            answer = self._waiting.pop(result.request_id, None)
            if answer is None:
                others.append(result)
            elif not answer.done():
                answer.set_result(result)
        return others


class Probes:
    """Compares the weights that the engine serves with the announced ones.

    Args:
        engine: to be probed.
        announced: gives the announced weights of a version in service.
        record: hears of each comparison: agrees, differs or not_comparable.
    """

    def __init__(
        self,
        engine: InferenceEngine,
        announced: Callable[[PolicyVersion], AnnouncedWeights | None],
        record: Callable[[str], None],
    ) -> None:
        self._engine = engine
        self._announced = announced
        self._record = record

    async def probe(self, token_ids: Sequence[int]) -> generator_pb2.ProbeResponse:
        """Log-probs of the tokens, and the digest of the tensors that gave them.

        Raises:
            PayloadError: the engine refuses the tokens.
        """
        # Imported late: torch takes a second.
        from rollmesh.generators.weights.served_digest import inspect

        probe = await asyncio.wrap_future(self._engine.probe(token_ids))
        response = generator_pb2.ProbeResponse(
            serving=probe.version.to_proto(), announced_digest=probe.digest, log_probs=probe.log_probs.tolist()
        )
        announced = self._announced(probe.version)
        if announced is None:
            self._record("not_comparable")
            response.not_comparable = "the version changed during the probe"
            return response
        inspection = await asyncio.to_thread(inspect, announced, probe.tensors)
        response.found_digest, response.not_comparable = inspection.digest, inspection.not_comparable
        response.differing.extend(inspection.differing[:_DIFFERING])
        same = inspection.digest == probe.digest
        self._record("not_comparable" if not inspection.digest else "agrees" if same else "differs")
        return response


class ControlledGenerator(Protocol):
    """The generator as the control service sees it."""

    @property
    def engine_name(self) -> str:
        """Name of the inference engine."""
        ...

    @property
    def context(self) -> int:
        """Tokens that prompt and response may have together."""
        ...

    @property
    def weights_transport(self) -> str:
        """The transport that brings the weights, and the reasons against cheaper ones."""
        ...

    @property
    def manual(self) -> ManualRequests | None:
        """Answers prompts by hand; None before there are weights."""
        ...

    @property
    def probes(self) -> Probes | None:
        """Probes the weights in service; None before there are weights."""
        ...

    @property
    def turns(self) -> DeviceTurns:
        """Its sleep."""
        ...

    def snapshot(self) -> tuple[EngineStatus | None, int, str]:
        """The engine's status (None before there is one), groups held, and why it waits."""
        ...

    def drain_within(self, timeout_s: float) -> None:
        """Bounds the time that running sequences get at the end."""
        ...


class GeneratorControl(generator_pb2_grpc.GeneratorControlServicer):
    """Serves the GeneratorControl contract."""

    def __init__(self, generator: ControlledGenerator, shutdown: Shutdown) -> None:
        self._generator = generator
        self._shutdown = shutdown

    async def Status(
        self, _request: generator_pb2.GeneratorStatusRequest, _context: Any
    ) -> generator_pb2.GeneratorStatusResponse:
        """A snapshot."""
        status, groups_held, reason = self._generator.snapshot()
        response = generator_pb2.GeneratorStatusResponse(
            groups_held=groups_held,
            waiting_reason=reason,
            engine=self._generator.engine_name,
            weights_transport=self._generator.weights_transport,
            context=self._generator.context,
            shares_devices=self._generator.turns.shares_devices,
            sleeping=self._generator.turns.state.level,
        )
        if status is not None:
            response.active_sequences = status.active
            response.queued_sequences = status.queued
            response.tokens_generated = status.tokens_generated
            response.swaps = status.swaps
            response.weights_digest = status.digest
            if status.serving is not None:
                response.serving.CopyFrom(status.serving.to_proto())
        return response

    async def Drain(self, request: generator_pb2.DrainRequest, _context: Any) -> generator_pb2.DrainResponse:
        """Asks for a graceful end and answers at once."""
        self._generator.drain_within(request.timeout_ms / 1000)
        self._shutdown.request("Drain")
        return generator_pb2.DrainResponse()

    async def Sleep(self, request: generator_pb2.SleepRequest, _context: Any) -> generator_pb2.SleepResponse:
        """Gives memory back to a learner that shares the devices."""
        return await self._generator.turns.sleep(request)

    async def Wake(self, request: generator_pb2.WakeRequest, _context: Any) -> generator_pb2.WakeResponse:
        """Takes memory again."""
        return await self._generator.turns.wake(request)

    async def Generate(self, request: generator_pb2.GenerateRequest, _context: Any) -> generator_pb2.GenerateResponse:
        """Generates one response to one prompt, with its log-probs and versions."""
        manual = self._generator.manual
        if manual is None:
            raise self._without_weights()
        prompt_ids = list(request.prompt_ids) or manual.text.encode(request.prompt)
        if not prompt_ids:
            raise PayloadError("prompt_ids", "no prompt was given")
        try:
            async with asyncio.timeout(_MANUAL_S):
                result = await manual.generate(prompt_ids, request.sampling)
        except TimeoutError:
            raise UnreachableError(f"no response within {_MANUAL_S:.0f} s", hint="is the generator asleep?") from None
        return generator_pb2.GenerateResponse(
            response_ids=result.sampled.response_ids.tolist(),
            log_probs=result.sampled.log_probs.tolist(),
            versions=[version.to_proto() for version in result.sampled.versions],
            finish_reason=FINISH_REASONS[result.finish_reason],
            text=manual.text.decode([result.sampled.response_ids])[0],
        )

    async def Probe(self, request: generator_pb2.ProbeRequest, _context: Any) -> generator_pb2.ProbeResponse:
        """Log-probs of given tokens, and the identity of the weights that gave them."""
        probes = self._generator.probes
        if probes is None:
            raise self._without_weights()
        return await probes.probe(list(request.token_ids))

    def _without_weights(self) -> UnreachableError:
        if reason := self._generator.turns.waiting_reason:
            return UnreachableError(f"this generator has no weights: {reason}", hint="ask again after that")
        return UnreachableError("this generator has no weights yet", hint="is a learner running?")
