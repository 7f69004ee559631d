"""One swap of weights, between two decode steps: the model's parameters, and what sequences keep of the former ones.

Invariant: it happens, or all is as before; what fails halfway is taken back.
"""

from __future__ import annotations

import threading
import time
from queue import SimpleQueue

from rollmesh.generators.engines.hf.decoder import Decoder
from rollmesh.generators.engines.hf.waiting_queue import WaitingQueue
from rollmesh.generators.engines.hf.weights import ModelWeights, Staged
from rollmesh.generators.engines.interface import KvPolicy
from rollmesh.mesh.errors import WeightsError


class DeferredFree:
    """Lets go of weights in a thread: who drops the last reference pays as much as for a copy."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[Staged | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="hf-engine-disposal", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def add(self, weights: Staged) -> None:
        """Lets go of weights soon; the caller uses them no more."""
        self._queue.put(weights)

    def stop(self) -> None:
        """Ends the thread when it has done what was asked of it."""
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()

    def _run(self) -> None:
        while (weights := self._queue.get()) is not None:
            # Callers may still hold the object: what counts is what it refers to.
            weights.pairs.clear()


class WeightSwapper:
    """Swaps for one engine, in its thread.

    Args:
        weights: of the model.
        decoder: has the running sequences.
        line: has the waiting ones.
        kv: what becomes of running sequences.
    """

    def __init__(self, weights: ModelWeights, decoder: Decoder, line: WaitingQueue, kv: KvPolicy) -> None:
        self._weights = weights
        self._decoder = decoder
        self._line = line
        self._kv = kv
        self._disposal = DeferredFree()

    def start(self) -> None:
        """To be called once, before the first swap."""
        self._disposal.start()

    def stop(self) -> None:
        """To be called after the last swap."""
        self._disposal.stop()

    def swap(self, staged: Staged) -> float:
        """Lets the model have these weights, and running sequences keys and values that fit the KV policy.

        Returns:
            Seconds that recomputing took; 0 under other policies.

        Raises:
            WeightsError: the former weights are in service.
        """
        former = self._weights.swap(staged)
        # A prefix never meets other weights than those that made it.
        self._line.drop_prefixes()
        recompute_s = self._recompute(former) if self._kv == "recompute" else 0.0
        if self._kv == "interrupt":
            self._line.put_back(self._decoder.interrupt())
        self._disposal.add(former)
        return recompute_s

    def _recompute(self, former: Staged) -> float:
        begin = time.perf_counter()
        try:
            self._decoder.recompute()
        except (RuntimeError, MemoryError) as error:
            self._disposal.add(self._weights.swap(former))
            # Some may have keys and values of weights that are gone again: all go on from their tokens.
            self._line.put_back(self._decoder.interrupt())
            raise WeightsError(f"keys and values of running sequences could not be recomputed: {error}") from error
        return time.perf_counter() - begin
