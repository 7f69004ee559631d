"""Versions in a folder: names and headers of the safetensors files, which learner and generators agree on.

One file per bucket. The files are ordinary safetensors. Their metadata name the version that they belong to and the
place of each tensor in the bucket. So a reader can restore the bucket from the files alone.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath

from rollmesh.mesh.errors import WeightsError
from rollmesh.mesh.trajectory.versions import PolicyVersion

INDEX_NAME = "model.safetensors.index.json"
# Keys of the metadata.
POLICY_KEY, DIGEST_KEY, OFFSETS_KEY = "rollmesh.policy", "rollmesh.digest", "rollmesh.offsets"
LENGTH_BYTES = 8
# The format's own limit of a header.
_MAX_HEADER_BYTES = 100_000_000
# Positions in files are signed.
_LARGEST_FILE = 1 << 62


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a file.

    Attributes:
        position: where its bytes begin in the file.
        nbytes: how many they are.
        offset: where they begin in the bucket.
    """

    position: int
    nbytes: int
    offset: int


def version_folder(run: str, policy: PolicyVersion) -> PurePosixPath:
    """Folder of a version, below the one that all share."""
    return PurePosixPath(run) / f"{policy.incarnation}-{policy.version}"


def bucket_file(index: int, count: int) -> str:
    """Name of a bucket's file, as Hugging Face names shards."""
    return f"model-{index + 1:05d}-of-{count:05d}.safetensors"


def metadata_of(policy: PolicyVersion, digest: str, offsets: Mapping[str, int]) -> dict[str, str]:
    """Metadata of a bucket's file.

    Args:
        policy: the version.
        digest: of its manifest.
        offsets: of each tensor in the bucket, in bytes.
    """
    return {"format": "pt", POLICY_KEY: str(policy), DIGEST_KEY: digest, OFFSETS_KEY: json.dumps(offsets)}


def header_length(prefix: bytes) -> int:
    """Length of a file's header, from the file's first `LENGTH_BYTES` bytes.

    Raises:
        WeightsError: the file is too short, or is no safetensors.
    """
    length = int(struct.unpack("<Q", prefix)[0]) if len(prefix) == LENGTH_BYTES else 0
    if not 0 < length <= _MAX_HEADER_BYTES:
        raise WeightsError("it does not begin like safetensors")
    return length


def parse_header(header: bytes, digest: str, bucket_bytes: int) -> list[StoredTensor]:
    """The places of the tensors of a bucket, every one inside the bucket.

    Args:
        header: of the bucket's file.
        digest: of the manifest of the version that is wanted; versions of equal weights share files.
        bucket_bytes: length of the bucket.

    Raises:
        WeightsError: the header is cut off, not one of ours, or of another version.
    """
    try:
        entries = json.loads(header)
        metadata = entries.pop("__metadata__")
        policy, found, offsets = metadata[POLICY_KEY], metadata[DIGEST_KEY], json.loads(metadata[OFFSETS_KEY])
        start = LENGTH_BYTES + len(header)
        tensors = []
        for name, entry in entries.items():
            begin, end = (int(value) for value in entry["data_offsets"])
            tensors.append(StoredTensor(start + begin, end - begin, int(offsets[name])))
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise WeightsError(f"its header cannot be read: {type(error).__name__}: {error}") from error
    if found != digest:
        raise WeightsError(f"it belongs to version {policy}")
    for tensor in tensors:
        if min(tensor.nbytes, tensor.offset) < 0 or tensor.offset + tensor.nbytes > bucket_bytes:
            raise WeightsError("a tensor lies outside its bucket")
        if not 0 <= tensor.position < _LARGEST_FILE:
            raise WeightsError("a tensor lies outside any file")
    return tensors
