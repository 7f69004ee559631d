"""The model bundle, fetched from the learner: the files of which a generator builds model and tokenizer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterable, Mapping, Sequence
from pathlib import Path

import grpc

from rollmesh.generators.weights.learner_connection import LearnerDirectory, is_channel_closed
from rollmesh.mesh.errors import DataError, UnreachableError
from rollmesh.mesh.model_bundle import MAX_BYTES, MAX_FILE_BYTES, MAX_FILES, is_bundled
from rollmesh.mesh.rpc.errors import is_transient, to_rollmesh_error
from rollmesh.protos import weights_pb2

log = logging.getLogger(__name__)
_PAUSE_S = 0.5


async def fetch_model_bundle(directory: LearnerDirectory, folder: Path, *, timeout_s: float, retry_s: float) -> None:
    """Writes the learner's model files into `folder`; waits for a learner if none is registered.

    Args:
        directory: leads to the learner.
        folder: exists and is empty.
        timeout_s: deadline of one try.
        retry_s: seconds for which a learner that the mesh names may fail to answer.

    Raises:
        UnreachableError: the learner did not answer for `retry_s`.
        DataError: the bundle is not usable.
    """
    loop = asyncio.get_running_loop()
    await directory.connection()
    give_up_at = loop.time() + retry_s
    while True:
        connection = await directory.connection()
        call = connection.weights.GetModelBundle(weights_pb2.GetModelBundleRequest(), timeout=timeout_s)
        try:
            files = await read_parts(call)
        except grpc.aio.AioRpcError as error:
            typed = to_rollmesh_error(error, f"model files from the learner at {connection.address}")
            if not is_transient(error):
                raise typed from error
            if loop.time() > give_up_at:
                raise UnreachableError(f"no model files for {retry_s:.0f} s: {typed.message}") from error
            log.info("%s; trying again", typed.message)
            await connection.replaced_within(_PAUSE_S)
            continue
        except (grpc.aio.UsageError, asyncio.CancelledError) as error:
            if not is_channel_closed(error):
                raise
            continue
        write_model_files(files, folder)
        return


async def read_parts(parts: AsyncIterable[weights_pb2.ModelFile]) -> dict[str, list[bytes]]:
    """A bundle's files, each as its parts in order; nothing that no bundle may hold is kept in memory.

    Raises:
        DataError: a file that belongs to no bundle, or too many or too large ones.
    """
    files: dict[str, list[bytes]] = {}
    sizes: dict[str, int] = {}
    async for part in parts:
        if not is_bundled(part.name):
            raise DataError(
                f"the learner's model bundle has a file that is none of a model's configuration: {part.name!r}"
            )
        files.setdefault(part.name, []).append(part.content)
        sizes[part.name] = sizes.get(part.name, 0) + len(part.content)
        if len(files) > MAX_FILES or sizes[part.name] > MAX_FILE_BYTES or sum(sizes.values()) > MAX_BYTES:
            raise DataError(
                f"the learner's model bundle is too large at {part.name!r}: at most {MAX_FILES} files of "
                f"{MAX_FILE_BYTES >> 20} MiB, {MAX_BYTES >> 20} MiB together"
            )
    return files


def write_model_files(files: Mapping[str, Sequence[bytes]], folder: Path) -> None:
    """Writes the files of `read_parts` into a folder.

    Raises:
        DataError: the bundle is not usable.
    """
    if "config.json" not in files:
        raise DataError("the learner's model bundle has no config.json")
    for name, parts in files.items():
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(b"".join(parts))
    log.info("model files: %s", ", ".join(sorted(files)))
