"""Versioned weights as bytes: layout in buckets, digests, manifests. No RPC; torch in `tensors` and `broadcast` alone,
I/O in `broadcast` alone."""

from rollmesh.mesh.weights.digest import Digest, digest_of, manifest_digest
from rollmesh.mesh.weights.layout import ALIGNMENT, DTYPE_BYTES, BucketLayout, Placement
from rollmesh.mesh.weights.manifest import bucket_starts, check_manifest
from rollmesh.mesh.weights.wanted import Encoding, Wanted

__all__ = [
    "ALIGNMENT",
    "DTYPE_BYTES",
    "BucketLayout",
    "Digest",
    "Encoding",
    "Placement",
    "Wanted",
    "bucket_starts",
    "check_manifest",
    "digest_of",
    "manifest_digest",
]
