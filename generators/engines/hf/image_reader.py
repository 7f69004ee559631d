"""Images of requests are read in threads while others decode; a request enters no queue before.

Invariant: what is being read ends like what waits: it is aborted, counted as pinned, and refused by name. All methods
are for the engine's thread, which hears of what was read through its inbox.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from rollmesh.generators.engines.hf.command_queue import CommandQueue
from rollmesh.generators.engines.hf.commands import Widened
from rollmesh.generators.engines.interface import EngineError, GenerationRequest
from rollmesh.generators.engines.request_validation import Limits, expand_images
from rollmesh.mesh.errors import PayloadError
from rollmesh.mesh.trajectory.images import ImageProcessor

# Images are decoded in C, but the steps of the model want the processors too.
_THREADS = 2


class Reading:
    """Requests whose images are being read.

    Args:
        images: of the model; None: it takes none.
        limits: of the model.
        inbox: of the engine.
    """

    def __init__(self, images: ImageProcessor | None, limits: Limits, inbox: CommandQueue) -> None:
        self._images = images
        self._limits = limits
        self._inbox = inbox
        self._requests: dict[str, GenerationRequest] = {}
        self._threads = ThreadPoolExecutor(_THREADS, "hf-engine-images")

    @property
    def pinned(self) -> set[str]:
        """Ids of the pinned ones."""
        return {name for name, request in self._requests.items() if request.pinned}

    def begin(self, requests: Sequence[GenerationRequest]) -> None:
        """Has them read; `Widened` follows."""
        if self._images is not None:
            self._requests.update((request.request_id, request) for request in requests)
            self._threads.submit(self._read, requests, self._images)

    def withdraw(self, request_ids: set[str]) -> list[GenerationRequest]:
        """Forgets and returns those with these ids."""
        return [self._requests.pop(name) for name in list(self._requests) if name in request_ids]

    def end(self, command: Widened) -> list[tuple[GenerationRequest, GenerationRequest | PayloadError]]:
        """What was read, but of requests that were withdrawn meanwhile."""
        wanted = [(asked, seen) for asked, seen in command.requests if self._requests.get(asked.request_id) is asked]
        for asked, _ in wanted:
            del self._requests[asked.request_id]
        return wanted

    def stop(self) -> None:
        """Reads no more."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _read(self, requests: Sequence[GenerationRequest], images: ImageProcessor) -> None:
        seen = expand_images(requests, images, self._limits)
        # An engine that is gone has told of them already.
        with suppress(EngineError):
            self._inbox.put(Widened(list(zip(requests, seen, strict=True))))
