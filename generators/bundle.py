"""The model bundle: what a generator needs to build model and tokenizer, fetched from the learner."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath

import grpc

from generators.learner_link import LearnerLink, closed_under_call
from mesh.errors import DataError, UnreachableError
from mesh.rpc import is_transient, to_rollmesh_error
from protos import weights_pb2

log = logging.getLogger(__name__)
_PAUSE_S = 0.5


async def fetch_model_bundle(link: LearnerLink, folder: Path, *, timeout_s: float, retry_s: float) -> None:
    """Writes the learner's model files into `folder`; waits for a learner if there is none.

    Args:
        link: the way to the learner.
        folder: exists and is empty.
        timeout_s: deadline of one try.
        retry_s: seconds for which a learner that the mesh names may fail to answer.

    Raises:
        UnreachableError: the learner did not answer for `retry_s`.
        DataError: the bundle is not usable.
    """
    loop = asyncio.get_running_loop()
    await link.connection()
    give_up_at = loop.time() + retry_s
    while True:
        connection = await link.connection()
        call = connection.weights.GetModelBundle(weights_pb2.GetModelBundleRequest(), timeout=timeout_s)
        try:
            files: dict[str, list[bytes]] = {}
            async for part in call:
                files.setdefault(part.name, []).append(part.content)
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
            if not closed_under_call(error):
                raise
            continue
        write_model_files(files, folder)
        return


def write_model_files(files: Mapping[str, Sequence[bytes]], folder: Path) -> None:
    """Writes a bundle's files, each from its parts in order, into a folder.

    Raises:
        DataError: the bundle is not usable.
    """
    if "config.json" not in files:
        raise DataError("the learner's model bundle has no config.json")
    for name, parts in files.items():
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts:
            raise DataError(f"the learner's model bundle names a file outside its folder: {name!r}")
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(b"".join(parts))
    log.info("model files: %s", ", ".join(sorted(files)))
