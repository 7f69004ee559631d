"""The process of a judging model: reads texts, batches them over all callers, and answers until its owner hangs up.

One thread reads and tokenizes. Each lane of the engine is a thread that takes the next batch and computes it. A batch
that the engine refuses is divided, so that the sequence at fault fails alone.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Sequence as Listed
from pathlib import Path
from typing import Any

import msgpack

from rollmesh.mesh.errors import RewardError
from rollmesh.mesh.runtime.log_format import LogSettings, setup_logging
from rollmesh.reward_service.served_model.batching import Waiting, next_batch
from rollmesh.reward_service.served_model.engine import AwayError, Engine, RefusedError
from rollmesh.reward_service.served_model.messages import (
    ASK,
    AWAY,
    BEGUN,
    DONE,
    DROP,
    FAILED,
    HEARD,
    READY,
    REFUSED,
    ModelOptions,
)
from rollmesh.reward_service.served_model.texts import Reader, Sequence

log = logging.getLogger(__name__)
_READ_BYTES = 1 << 18
# No text has as many characters in each of its tokens. Beyond that it is not even read, which would take seconds.
_MOST_CHARACTERS = 32
# Seconds before an engine that is away is asked again.
_AWAY_S = 0.5


class _Owner:
    """The socket to the owner."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._stream = msgpack.Unpacker(max_buffer_size=0)
        self._sending = threading.Lock()

    def receive(self) -> Any:
        """The next message; None once the owner has hung up."""
        while True:
            for message in self._stream:
                return message
            data = self._connection.recv(_READ_BYTES)
            if not data:
                return None
            self._stream.feed(data)

    def send(self, *message: Any) -> None:
        with self._sending:
            self._connection.sendall(msgpack.packb(message))


class _Queue:
    """Sequences that wait, for all lanes."""

    def __init__(self, options: ModelOptions) -> None:
        self._options = options
        self._changed = threading.Condition()
        self._waiting: dict[int, tuple[Waiting, Sequence]] = {}

    def add(self, job: int, sequence: Sequence, *, alone: bool = False) -> None:
        with self._changed:
            self._waiting[job] = Waiting(job, len(sequence.ids), time.monotonic(), alone), sequence
            self._changed.notify()

    def drop(self, jobs: Listed[int]) -> None:
        with self._changed:
            for job in jobs:
                self._waiting.pop(job, None)

    def take(self, owner: _Owner) -> list[tuple[int, Sequence]]:
        """The next batch, as soon as one is due; its owner hears that it is begun."""
        with self._changed:
            while True:
                wait_s: float | None = None
                if self._waiting:
                    choice = next_batch(
                        [each for each, _ in self._waiting.values()],
                        time.monotonic(),
                        max_tokens=self._options.max_tokens,
                        max_wait_s=self._options.max_wait_s,
                    )
                    if choice.keys:
                        owner.send(BEGUN, choice.keys)
                        return [(key, self._waiting.pop(key)[1]) for key in choice.keys]
                    wait_s = choice.wait_s
                self._changed.wait(wait_s)


def main() -> None:
    """Serves; the argument is the descriptor of the socket."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    os.dup2(2, 1)
    owner = _Owner(connection)
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        _serve(owner)
    # Lanes may still compute; no one reads their values.
    os._exit(0)


def _serve(owner: _Owner) -> None:
    if (first := owner.receive()) is None:
        return
    options = ModelOptions(**first[0])
    setup_logging("reward-model", LogSettings(*first[1]))
    try:
        reader, engine = load(options)
    except RewardError as error:
        owner.send(REFUSED, error.message, error.hint)
        return
    queue = _Queue(options)
    for number in range(engine.lanes):
        threading.Thread(target=_lane, args=(engine, queue, owner), name=f"lane-{number}", daemon=True).start()
    owner.send(READY)
    while (message := owner.receive()) is not None:
        kind, jobs = message
        if kind == DROP:
            queue.drop(jobs)
        elif kind == ASK:
            for job, text, alone in jobs:
                owner.send(HEARD, job)
                _read(owner, reader, engine.longest, queue, job, text, alone=alone)
        owner.send(HEARD, 0)


def load(options: ModelOptions) -> tuple[Reader, Engine]:
    """A model's reader and engine.

    Raises:
        RewardError: it cannot be loaded.
    """
    from transformers import AutoTokenizer
    from transformers.utils import logging as transformers_logging

    # They would fill the service's log.
    transformers_logging.disable_progress_bar()
    try:
        tokenizer = AutoTokenizer.from_pretrained(Path(options.folder), local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise RewardError(f"the tokenizer of {options.folder} cannot be loaded: {error}") from error
    reader = Reader(tokenizer, options)
    if options.engine == "transformers":
        from rollmesh.reward_service.served_model.local import LocalModel

        return reader, LocalModel(options, tokenizer)
    if options.url:
        from rollmesh.reward_service.served_model.remote import RemoteModel

        return reader, RemoteModel(options)
    from rollmesh.reward_service.served_model.server import OwnedModel

    return reader, OwnedModel(options)


def _read(
    owner: _Owner, reader: Reader, longest: int | None, queue: _Queue, job: int, text: Any, *, alone: bool
) -> None:
    characters = len(text[0]) + (len(text[1]) if isinstance(text[1], str) else sum(map(len, text[1])))
    if longest is not None and characters > _MOST_CHARACTERS * longest:
        message = f"{characters} characters, and the reward model knows {longest} tokens"
        owner.send(FAILED, [[job, "too_long", message]])
        return
    try:
        sequence = reader.read(text)
    except Exception as error:  # noqa: BLE001  # a template is code that comes with the model
        owner.send(FAILED, [[job, "bad_input", f"{type(error).__name__}: {error}"]])
        return
    tokens = len(sequence.ids)
    if longest is not None and tokens > longest:
        owner.send(FAILED, [[job, "too_long", f"{tokens} tokens, and the reward model knows {longest}"]])
    elif not sequence.places or not tokens:
        owner.send(FAILED, [[job, "bad_input", "there is no text"]])
    else:
        queue.add(job, sequence, alone=alone)


def _lane(engine: Engine, queue: _Queue, owner: _Owner) -> None:
    """Computes batches until the process ends."""
    try:
        while True:
            batch = queue.take(owner)
            try:
                _compute(engine, batch, owner)
            except AwayError as error:
                owner.send(AWAY, str(error), [job for job, _ in batch])
                for job, sequence in batch:
                    queue.add(job, sequence)
                time.sleep(_AWAY_S)
    except (BrokenPipeError, ConnectionResetError):
        return
    except BaseException:
        # The owner sees the end of the process, and tries each sequence of the batch alone.
        log.exception("the reward model fails")
        os._exit(1)


def _compute(engine: Engine, batch: Listed[tuple[int, Sequence]], owner: _Owner) -> None:
    try:
        values = engine.values([sequence for _, sequence in batch])
    except RefusedError as error:
        if len(batch) == 1:
            owner.send(FAILED, [[batch[0][0], error.code, error.message]])
            return
        middle = len(batch) // 2
        _compute(engine, batch[:middle], owner)
        _compute(engine, batch[middle:], owner)
        return
    owner.send(DONE, [[job, found] for (job, _), found in zip(batch, values, strict=True)])
