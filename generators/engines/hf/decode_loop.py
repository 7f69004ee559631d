"""The `hf` engine's thread: it executes the commands of other threads between two decode steps.

Invariants: only this thread touches the model and the running sequences. It sleeps only where nothing can be done
before another command arrives. A command leaves its queue when it is done: an engine that ends amid one refuses it with
the rest. While paused nothing is decoded. While asleep nothing runs: interrupted sequences wait at the head of the
queue, with their tokens.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

import torch

from rollmesh.generators.engines import commands
from rollmesh.generators.engines.commands import Inspect, Pause, Probe, Resume, Sleep, Wake, reject, resolve
from rollmesh.generators.engines.errors import EngineError, ending_of
from rollmesh.generators.engines.hf.command_queue import (
    Abort,
    Command,
    CommandQueue,
    ImagesRead,
    Progress,
    Submit,
    UpdateWeights,
)
from rollmesh.generators.engines.hf.decode_turn import Stepper
from rollmesh.generators.engines.hf.decoder import Decoder
from rollmesh.generators.engines.hf.image_reader import ImageReader
from rollmesh.generators.engines.hf.waiting_queue import WaitingQueue, unsampled
from rollmesh.generators.engines.hf.weight_swap import WeightSwapper
from rollmesh.generators.engines.hf.weights import ModelWeights
from rollmesh.generators.engines.interface import EngineListener
from rollmesh.generators.engines.process_memory import release_unused_memory
from rollmesh.generators.engines.types import (
    EngineState,
    GenerationRequest,
    GenerationResult,
    KvPolicy,
    ProbeResult,
    ServedWeights,
    SleepLevel,
    SleepReport,
    WakeStep,
)
from rollmesh.mesh.errors import PayloadError, WeightsError


class DecodeLoop:
    """The loop that the thread runs.

    Args:
        decoder: over the model.
        weights: of the model.
        image_reader: reads the images of requests.
        command_queue: commands of other threads.
        listener: see `EngineListener`.
        kv: what becomes of running sequences at a swap.

    Attributes:
        state: running, paused or asleep.
        swaps: weight updates done.
        digest: of the weights in service; empty without weights.
    """

    def __init__(
        self,
        decoder: Decoder,
        weights: ModelWeights,
        image_reader: ImageReader,
        command_queue: CommandQueue,
        listener: EngineListener,
        kv: KvPolicy,
    ) -> None:
        self._decoder = decoder
        self._weights = weights
        self._image_reader = image_reader
        self._commands = command_queue
        self._listener = listener
        self._waiting = WaitingQueue()
        self._stepper = Stepper(decoder, self._waiting)
        self._swapper = WeightSwapper(weights, decoder, self._waiting, kv)
        self._current: deque[Command] = deque()
        self._updates: deque[UpdateWeights] = deque()
        self._prepared = False
        self.state: EngineState = "running"
        self.swaps = 0
        self.digest = ""

    @property
    def preemptions(self) -> int:
        """Sequences that lost their keys and values for lack of memory."""
        return self._stepper.preemptions

    def run(self) -> None:
        """Runs until the engine is stopped, or fails."""
        self._swapper.start()
        # A thread takes torch's number of threads when it first asks; until then some libraries have their own.
        torch.get_num_threads()
        try:
            with torch.inference_mode():
                while not self._commands.stopping:
                    self._turn()
                self._abandon()
        except Exception as error:  # noqa: BLE001 - whatever the model's code or a callback raises must be reported
            self._fail(error)
        finally:
            self._image_reader.stop()
            self._swapper.stop()

    def _turn(self) -> None:
        if self._commands or not self._has_work():
            self._execute_commands()
            if self._commands.stopping:
                return
        if self._can_swap():
            self._swap(self._updates[0])
            self._updates.popleft()
            return
        if not self._can_decode():
            return
        step = self._stepper.turn(pinned_only=bool(self._updates))
        if step.events:
            self._listener.on_tokens(step.events)
        self._deliver(step.results)

    def _has_work(self) -> bool:
        return self._can_swap() or (self._can_decode() and bool(self._waiting or self._decoder.table.active))

    def _can_swap(self) -> bool:
        if not self._updates:
            return False
        return self._decoder.serving is None or not (
            self._decoder.pinned + self._waiting.pinned or self._image_reader.pinned
        )

    def _can_decode(self) -> bool:
        return self.state == "running" and self._decoder.serving is not None

    def _execute_commands(self) -> None:
        self._current = self._commands.pop_all(self._has_work)
        while self._current:
            match command := self._current[0]:
                case Submit():
                    self._submit(command.requests)
                case ImagesRead():
                    self._enqueue_read(command)
                case Abort():
                    self._deliver(self._end_early(command.request_ids))
                case Progress():
                    waiting = self._waiting.progress(command.at_least)
                    resolve(command.done, waiting + self._decoder.table.progress(command.at_least))
                case Probe():
                    self._probe(command)
                case Inspect():
                    self._inspect(command)
                case commands.UpdateWeights():
                    self._updates.append(command)
                case Pause():
                    self.state = "paused" if self.state == "running" else self.state
                    resolve(command.done, None)
                case Resume():
                    self._resume(command)
                case Sleep():
                    self._sleep(command)
                case Wake():
                    self._wake(command)
            self._current.popleft()

    # --- requests ---

    def _submit(self, requests: Sequence[GenerationRequest]) -> None:
        pictured = [request for request in requests if request.images]
        if pictured:
            self._image_reader.read(pictured)
            requests = [request for request in requests if not request.images]
        self._queue(requests)

    def _enqueue_read(self, command: ImagesRead) -> None:
        outcomes = self._image_reader.pop_read(command)
        refused = [
            unsampled(request, "aborted", str(outcome))
            for request, outcome in outcomes
            if isinstance(outcome, PayloadError)
        ]
        self._queue([outcome for _, outcome in outcomes if not isinstance(outcome, PayloadError)])
        self._deliver(refused)

    def _queue(self, requests: Sequence[GenerationRequest]) -> None:
        """Queues requests; requests with a prefix that leaves nothing to sample end here."""
        complete = [
            (request, self._decoder.finish_reason(request)) for request in requests if request.prefix is not None
        ]
        results = [unsampled(request, reason) for request, reason in complete if reason is not None]
        ended = {result.request_id for result in results}
        self._waiting.add([request for request in requests if request.request_id not in ended] if ended else requests)
        self._deliver(results)

    def _end_early(self, request_ids: set[str]) -> list[GenerationResult]:
        waiting = [unsampled(request, "aborted") for request in self._image_reader.remove(request_ids)]
        waiting += [unsampled(item.request, "aborted") for item in self._waiting.remove(request_ids)]
        return waiting + self._decoder.abort(request_ids)

    def _deliver(self, results: list[GenerationResult]) -> None:
        if results:
            ended = [result.request_id for result in results]
            self._stepper.forget(ended)
            self._listener.on_results(results)
            self._commands.mark_delivered(ended)

    # --- weights ---

    def _swap(self, update: UpdateWeights) -> None:
        if not update.done.set_running_or_notify_cancel():
            return
        begin = time.perf_counter()
        in_flight = self._decoder.table.active
        if update.staged is None:
            if update.refuse_other_weights(self.digest):
                return
        else:
            try:
                self._swapper.swap(update.staged)
            except WeightsError as error:
                update.done.set_exception(error)
                return
            self.swaps += 1
        self._decoder.mark_serving(update.version)
        end = time.perf_counter()
        self._prepare_once()
        self.digest = update.digest
        update.done.set_result(update.timings(begin, end, in_flight))

    def _prepare_once(self) -> None:
        """Prepares decode steps, once, as soon as the model can run."""
        if not self._prepared and self.state != "asleep":
            self._prepared = True
            self._decoder.prepare()

    def _probe(self, probe: Probe) -> None:
        if not probe.done.set_running_or_notify_cancel():
            return
        serving = self._decoder.serving
        if serving is None:
            probe.done.set_exception(WeightsError("the engine has no weights"))
            return
        if self.state == "asleep":
            probe.done.set_exception(EngineError("the engine is asleep", hint="wake it"))
            return
        try:
            log_probs = self._decoder.log_probs(probe.token_ids)
        except (RuntimeError, MemoryError) as error:
            # Long ones need memory that decoding does not: no reason to end what is running.
            probe.done.set_exception(EngineError(f"the probe failed: {error}", hint="probe with fewer tokens"))
            return
        probe.done.set_result(ProbeResult(serving, self.digest, log_probs, self._weights.tensors()))

    def _inspect(self, command: Inspect) -> None:
        if not command.done.set_running_or_notify_cancel():
            return
        if (serving := self._decoder.serving) is None:
            command.done.set_exception(WeightsError("the engine has no weights"))
            return
        command.done.set_result(ServedWeights(serving, self.digest, self._weights.tensors()))

    # --- pauses ---

    def _resume(self, command: Resume) -> None:
        if self.state == "asleep":
            reject(command.done, EngineError("the engine is asleep", hint="wake it"))
            return
        self.state = "running"
        resolve(command.done, None)

    def _sleep(self, command: Sleep) -> None:
        if not command.done.set_running_or_notify_cancel():
            return
        begin = time.perf_counter()
        self.state = "asleep"
        self._waiting.put_back(self._decoder.interrupt())
        self._waiting.drop_prefixes()
        freed = self._decoder.release()
        if command.level < SleepLevel.WITHOUT_WEIGHTS:
            freed += self._weights.to_host() if self._decoder.serving is not None else 0
        else:
            self._deliver(self._end_early(self._waiting.pinned_ids() | self._image_reader.pinned))
            self._decoder.serving = None
            self.digest = ""
            freed += self._weights.drop()
        self._return_memory()
        command.done.set_result(SleepReport(freed, time.perf_counter() - begin))

    def _wake(self, command: Wake) -> None:
        if not command.done.set_running_or_notify_cancel():
            return
        if self.state == "asleep":
            try:
                self._weights.to_device()
            except (RuntimeError, MemoryError) as error:
                no_room = EngineError(f"no memory to wake up: {error}", hint="free some, then wake it again")
                command.done.set_exception(no_room)
                return
            if command.step >= WakeStep.KV_CACHE:
                self.state = "paused"
                if self._decoder.serving is not None:
                    self._prepare_once()
        command.done.set_result(None)

    def _return_memory(self) -> None:
        """Returns what is free by now: to the device, and to the system."""
        self._updates = deque(update for update in self._updates if not update.done.cancelled())
        self._swapper.free_former()
        release_unused_memory()

    # --- the end ---

    def _abandon(self) -> None:
        """Ends everything in flight, for `stop`."""
        self._execute_commands()
        self._deliver(self._end_early(self._commands.in_flight))
        self._reject_all(EngineError("the engine was stopped before the swap"))

    def _fail(self, error: Exception) -> None:
        failure = ending_of(error)
        self._current += self._commands.close(failure)
        self._reject_all(failure)
        self._listener.on_failure(failure)

    def _reject_all(self, error: EngineError) -> None:
        for command in (*self._updates, *self._current):
            if not isinstance(command, Submit | ImagesRead | Abort):
                reject(command.done, error)
        self._updates.clear()
        self._current.clear()
