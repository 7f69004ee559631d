"""Compares an engine's weights with the announced ones: digests computed again from the engine's own tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from rollmesh.generators.weights.announced_weights import AnnouncedWeights
from rollmesh.mesh.weights import Digest, digest_of, manifest_digest
from rollmesh.mesh.weights.adapter import adapted_weights
from rollmesh.mesh.weights.merging import effective_tensors
from rollmesh.mesh.weights.tensors import bytes_of, dtype_of, to_wire
from rollmesh.protos import weights_pb2

# Roundings by which two sums of the same products may differ.
_ROUNDINGS = 2


@dataclass(frozen=True, slots=True)
class Inspection:
    """The outcome of a comparison.

    Attributes:
        digest: manifest digest of the engine's tensors; empty where it cannot be computed. That of other tensors than
            those of base and adapter is the digest of those that differ.
        not_comparable: why it cannot; empty where it can.
        differing: names of tensors with other bytes than announced, in the manifest's order.
    """

    digest: str
    not_comparable: str
    differing: list[str]


def inspect(announced: AnnouncedWeights, tensors: Mapping[str, torch.Tensor] | None) -> Inspection:
    """Digests an engine's tensors as the manifest's entries say: dtype by dtype, byte by byte.

    An adapter is merged into its base once more, for comparison: there are no digests of merged weights.

    Args:
        announced: the version that the engine serves.
        tensors: as they are in the engine, by Hugging Face name; None where it keeps them in another form.
    """
    if tensors is None:
        return Inspection("", "the engine keeps the weights in a form of its own: log-probs tell", [])
    if announced.adapter is not None:
        return _inspect_merged(announced.manifest, announced.adapter, announced.base, tensors)
    manifest = announced.manifest
    entries: list[weights_pb2.TensorEntry] = []
    differing = []
    digests: dict[str, str] = {}
    for entry in manifest.tensors:
        tensor = tensors.get(entry.name)
        if tensor is None:
            return Inspection("", f"the engine has no tensor {entry.name}", [])
        wire = dtype_of(entry.dtype)
        if not _is_lossless(tensor.dtype, wire):
            # Digits that a narrower dtype has rounded away cannot be brought back.
            return Inspection("", f"the engine holds {entry.name} as {tensor.dtype}, it travelled as {wire}", [])
        digest = digest_of(bytes_of(to_wire(tensor, wire)))
        digests[entry.name] = digest
        copy = weights_pb2.TensorEntry()
        copy.CopyFrom(entry)
        wanted = digests[entry.tied_to] if entry.tied_to else entry.digest
        if not entry.tied_to:
            copy.digest = digest
        elif digest != wanted:
            # The engine does not tie it: the manifest has no digest of its own for it.
            copy.tied_to = ""
            copy.digest = digest
        entries.append(copy)
        if digest != wanted:
            differing.append(entry.name)
    return Inspection(manifest_digest(entries), "", differing)


def _inspect_merged(
    manifest: weights_pb2.Manifest, adapter: memoryview, base: memoryview | None, tensors: Mapping[str, torch.Tensor]
) -> Inspection:
    differing = Digest()
    names = []
    adapted = adapted_weights(manifest)
    for name, expected in effective_tensors(manifest, adapter, base):
        tensor = tensors.get(name)
        if tensor is None:
            return Inspection("", f"the engine has no tensor {name}", [])
        if not _is_lossless(tensor.dtype, expected.dtype):
            return Inspection("", f"the engine holds {name} as {tensor.dtype}, its base as {expected.dtype}", [])
        found = to_wire(tensor, expected.dtype)
        if not _is_equal(found, expected, merged=name in adapted):
            differing.update(bytes_of(found))
            names.append(name)
    return Inspection(differing.hexdigest() if names else manifest.digest, "", names)


def _is_equal(found: torch.Tensor, expected: torch.Tensor, *, merged: bool) -> bool:
    """Byte by byte; merged weights up to rounding, for a product may be summed in another order."""
    if not merged:
        return torch.equal(found.reshape(-1).view(torch.uint8), expected.reshape(-1).view(torch.uint8))
    bound = _ROUNDINGS * torch.finfo(expected.dtype).eps
    largest = float(expected.abs().max()) if expected.numel() else 0.0
    return torch.allclose(found.float(), expected.float(), rtol=bound, atol=bound * largest, equal_nan=True)


def _is_lossless(dtype: torch.dtype, wire: torch.dtype) -> bool:
    """True where every value of `wire` comes back from `dtype` as it was."""
    if dtype == wire or not (dtype.is_floating_point and wire.is_floating_point):
        return dtype == wire
    wide, narrow = torch.finfo(dtype), torch.finfo(wire)
    subnormal = narrow.smallest_normal * narrow.eps
    return wide.eps <= narrow.eps and wide.max >= narrow.max and wide.smallest_normal * wide.eps <= subnormal
