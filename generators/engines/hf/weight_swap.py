"""One swap of weights, between two decode steps: the model's parameters, and the sequences' keys and values.

Invariant: it happens, or all is as before; a swap that fails halfway is undone.
"""

from __future__ import annotations

import threading
from queue import SimpleQueue

from rollmesh.generators.engines.errors import EngineError
from rollmesh.generators.engines.hf.decoder import Decoder
from rollmesh.generators.engines.hf.waiting_queue import WaitingQueue
from rollmesh.generators.engines.hf.weights import ModelWeights, StagedWeights
from rollmesh.generators.engines.types import KvPolicy
from rollmesh.mesh.errors import WeightsError

# Longest wait for former weights to be freed, which takes no longer than a copy of them.
_FREE_S = 60.0


class DeferredFree:
    """Frees weights in a thread: dropping the last reference costs as much as a copy."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[StagedWeights | threading.Event | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="hf-engine-disposal", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def add(self, weights: StagedWeights) -> None:
        """Frees weights soon; the caller uses them no more."""
        self._queue.put(weights)

    def flush(self) -> None:
        """Waits until all is freed that was added so far.

        Raises:
            EngineError: it takes longer than any memory does.
        """
        if self._thread.is_alive():
            reached = threading.Event()
            self._queue.put(reached)
            if not reached.wait(_FREE_S):
                raise EngineError(
                    f"thread {self._thread.name} has not freed the weights of earlier swaps within {_FREE_S:.0f} s",
                    hint="files that they were read from may be on a disk that does not answer",
                )

    def stop(self) -> None:
        """Ends the thread when it has freed all, or has hung for as long as `flush` waits: then with the process."""
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join(_FREE_S)

    def _run(self) -> None:
        while (weights := self._queue.get()) is not None:
            if isinstance(weights, threading.Event):
                weights.set()
            else:
                # Callers may still hold the object: its references are what counts.
                weights.pairs.clear()


class WeightSwapper:
    """Swaps for one engine, in its thread.

    Args:
        weights: of the model.
        decoder: has the running sequences.
        waiting: the queue of the others.
        kv: what becomes of running sequences.
    """

    def __init__(self, weights: ModelWeights, decoder: Decoder, waiting: WaitingQueue, kv: KvPolicy) -> None:
        self._weights = weights
        self._decoder = decoder
        self._waiting = waiting
        self._kv = kv
        self._deferred_free = DeferredFree()

    def start(self) -> None:
        """Starts the thread; once, before the first swap."""
        self._deferred_free.start()

    def stop(self) -> None:
        """Ends the thread, after the last swap."""
        self._deferred_free.stop()

    def free_former(self) -> None:
        """Waits until the weights of earlier swaps are freed.

        Raises:
            EngineError: see `DeferredFree.flush`.
        """
        self._deferred_free.flush()

    def swap(self, staged: StagedWeights) -> None:
        """Swaps the model's weights, and gives running sequences keys and values that fit the KV policy.

        Raises:
            WeightsError: the former weights are in service.
        """
        former = self._weights.swap(staged)
        # A prefix never meets other weights than those that made it.
        self._waiting.drop_prefixes()
        if self._kv == "recompute":
            self._recompute(former)
        elif self._kv == "interrupt":
            self._waiting.put_back(self._decoder.interrupt())
        self._deferred_free.add(former)

    def _recompute(self, former: StagedWeights) -> None:
        try:
            self._decoder.recompute()
        except (RuntimeError, MemoryError) as error:
            self._deferred_free.add(self._weights.swap(former))
            # Some may have keys and values of weights that are gone again: all continue from their tokens.
            self._waiting.put_back(self._decoder.interrupt())
            raise WeightsError(f"keys and values of running sequences could not be recomputed: {error}") from error
