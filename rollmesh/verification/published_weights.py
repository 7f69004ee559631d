"""A published version as the learner serves it, and its log-probs by a plain forward pass.

A version that is an adapter is merged into its base. The base's own log-probs are computed too: an engine that has lost
the adapter gives those.

Invariant: no part of an inference engine is used. The bytes come from the learner itself, are verified, and run through
the model's own code on this machine's CPU, without a cache.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import grpc
import torch

from rollmesh.generators.engines.hf.model.loading import LoadedModel, load_model
from rollmesh.generators.model_bundle import read_parts, write_model_files
from rollmesh.mesh.config.network import SecuritySection
from rollmesh.mesh.errors import DataError, WeightsError
from rollmesh.mesh.rpc.channel import open_channel
from rollmesh.mesh.rpc.errors import to_rollmesh_error
from rollmesh.mesh.runtime.scratch_folder import scratch_folder
from rollmesh.mesh.trajectory.versions import PolicyVersion
from rollmesh.mesh.weights import BucketSet, check_manifest
from rollmesh.mesh.weights.merging import effective_tensors
from rollmesh.protos import weights_pb2, weights_pb2_grpc
from rollmesh.verification.verdict import LearnerReference, tolerance_for

_BUNDLE_TIMEOUT_S = 60.0


class PublishedModel:
    """The learner's model, at whichever version is asked for.

    Args:
        address: of the learner.
        security: for the channel.
        timeout_s: for the bytes of one bucket.
    """

    def __init__(self, address: str, security: SecuritySection, *, timeout_s: float) -> None:
        self._address = address
        self._channel = open_channel(address, security)
        self.weights = weights_pb2_grpc.WeightsStub(self._channel)
        self._timeout_s = timeout_s
        self._loaded: LoadedModel | None = None
        # By digest: bytes of the base, and its log-probs.
        self._bases: dict[str, memoryview] = {}
        self._base_log_probs: dict[str, list[float]] = {}

    async def close(self) -> None:
        """Ends every call."""
        await self._channel.close()

    async def load(self, dtype: str) -> LoadedModel:
        """Builds the model and its tokenizer from the learner's files; it has no weights yet.

        Raises:
            RollmeshError: the learner does not answer, or has no model that can be built here.
        """
        try:
            request = weights_pb2.GetModelBundleRequest()
            files = await read_parts(self.weights.GetModelBundle(request, timeout=_BUNDLE_TIMEOUT_S))
        except grpc.aio.AioRpcError as error:
            raise to_rollmesh_error(error, f"model files from the learner at {self._address}") from error
        with scratch_folder("rollmesh-verify-") as folder:
            write_model_files(files, folder)
            self._loaded = load_model(folder, dtype=dtype, device="cpu")
        return self._loaded

    async def reference(
        self,
        manifest: weights_pb2.Manifest,
        data: memoryview,
        token_ids: Sequence[int],
        tolerance: float | None,
    ) -> LearnerReference:
        """Log-probs of tokens from the learner's bytes of a version.

        Args:
            manifest: as announced.
            data: of the version (`fetch`).
            token_ids: at least two.
            tolerance: largest difference of a log-prob that counts as equal; None: by the dtype of the weights.

        Raises:
            DataError: the model is not the one that the manifest describes.
            WeightsError: its base did not come whole.
        """
        loaded, base, of_base = self._loaded, None, None
        if loaded is None:
            raise WeightsError("the model has not been loaded")
        if manifest.HasField("base"):
            base = await self._base_of(manifest)
            of_base = self._base_log_probs.get(manifest.base.digest)
            if of_base is None:
                of_base = await asyncio.to_thread(_log_probs, loaded, manifest.base, base, None, token_ids)
                self._base_log_probs[manifest.base.digest] = of_base
        log_probs = await asyncio.to_thread(_log_probs, loaded, manifest, data, base, token_ids)
        dtypes = {entry.dtype for entry in manifest.tensors if entry.dtype.startswith(("float", "bfloat"))}
        allowed = tolerance_for(sorted(dtypes)) if tolerance is None else tolerance
        policy = PolicyVersion.from_proto(manifest.policy)
        return LearnerReference(policy, manifest.digest, log_probs, allowed, of_base)

    async def _base_of(self, manifest: weights_pb2.Manifest) -> memoryview:
        """The bytes of a version's base, fetched once."""
        digest = manifest.base.digest
        if digest not in self._bases:
            self._bases = {digest: await self.fetch(manifest.base)}
        return self._bases[digest]

    async def fetch(self, manifest: weights_pb2.Manifest) -> memoryview:
        """The learner's bytes of a version, verified.

        Raises:
            WeightsError: the version is not kept any more, or did not come whole.
        """
        check_manifest(manifest)
        bucket_set = BucketSet.full(manifest)
        data = memoryview(bytearray(bucket_set.nbytes))
        for index in range(len(bucket_set.buckets)):
            part, end = bucket_set.part(data, index), 0
            request = weights_pb2.FetchBucketRequest(policy=bucket_set.policy.to_proto(), bucket=index)
            try:
                async for chunk in self.weights.FetchBucket(request, timeout=self._timeout_s):
                    part[end : end + len(chunk.data)] = chunk.data
                    end += len(chunk.data)
            except grpc.aio.AioRpcError as error:
                typed = to_rollmesh_error(error, bucket_set.name(index))
                raise WeightsError(typed.message, hint=typed.hint) from error
            bucket_set.verify(index, part)
        return data


@torch.inference_mode()
def _log_probs(
    loaded: LoadedModel,
    manifest: weights_pb2.Manifest,
    data: memoryview,
    base: memoryview | None,
    token_ids: Sequence[int],
) -> list[float]:
    """Log-probs of each token from the second on, in nats."""
    targets = loaded.model.state_dict(keep_vars=True)
    missing = set(targets)
    for name, tensor in effective_tensors(manifest, data, base):
        target = targets.get(name)
        if target is None or target.shape != tensor.shape:
            raise DataError(f"the learner's model files do not describe its tensor {name}")
        target.data.copy_(tensor)
        missing -= {other for other in missing if targets[other] is target}
    if missing:
        raise DataError(f"the learner sends no tensor {min(missing)}")
    ids = torch.tensor([list(token_ids)])
    logits = loaded.model(input_ids=ids, use_cache=False).logits[0, :-1].float()
    found: list[float] = torch.log_softmax(logits, -1).gather(1, ids[0, 1:, None])[:, 0].tolist()
    return found
