"""Images of requests are read in threads while others decode; a request enters no queue before.

Invariant: a request whose images are being read ends like one that waits: it is aborted, counted as pinned, and refused
by name. All methods are for the engine's thread, which gets the read requests through its command queue.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from rollmesh.generators.engines.errors import EngineError
from rollmesh.generators.engines.hf.command_queue import CommandQueue, ImagesRead
from rollmesh.generators.engines.request_validation import RequestLimits, expand_images
from rollmesh.generators.engines.types import GenerationRequest
from rollmesh.mesh.errors import PayloadError
from rollmesh.mesh.trajectory.images import ImageProcessor

# Images are decoded in C, but the steps of the model need the processors too.
_THREADS = 2


class ImageReader:
    """Requests waiting for their images to be read.

    Args:
        images: of the model; None: it takes none.
        limits: of the model.
        command_queue: of the engine.
    """

    def __init__(self, images: ImageProcessor | None, limits: RequestLimits, command_queue: CommandQueue) -> None:
        self._images = images
        self._limits = limits
        self._commands = command_queue
        self._requests: dict[str, GenerationRequest] = {}
        self._threads = ThreadPoolExecutor(_THREADS, "hf-engine-images")

    @property
    def pinned(self) -> set[str]:
        """Ids of the pinned ones."""
        return {name for name, request in self._requests.items() if request.pinned}

    def read(self, requests: Sequence[GenerationRequest]) -> None:
        """Reads their images; an `ImagesRead` command follows."""
        if self._images is not None:
            self._requests.update((request.request_id, request) for request in requests)
            self._threads.submit(self._read, requests, self._images)

    def remove(self, request_ids: set[str]) -> list[GenerationRequest]:
        """Forgets and returns those with these ids."""
        return [self._requests.pop(name) for name in list(self._requests) if name in request_ids]

    def pop_read(self, command: ImagesRead) -> list[tuple[GenerationRequest, GenerationRequest | PayloadError]]:
        """Removes and returns the read requests, less those that were removed meanwhile."""
        kept = [
            (request, outcome)
            for request, outcome in command.requests
            if self._requests.get(request.request_id) is request
        ]
        for request, _ in kept:
            del self._requests[request.request_id]
        return kept

    def stop(self) -> None:
        """Stops reading."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _read(self, requests: Sequence[GenerationRequest], images: ImageProcessor) -> None:
        outcomes = expand_images(requests, images, self._limits)
        # An engine that is gone has reported them already.
        with suppress(EngineError):
            self._commands.put(ImagesRead(list(zip(requests, outcomes, strict=True))))
