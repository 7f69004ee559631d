"""Versioned weights as bytes: layout in buckets, digests, manifests. No RPC; torch in `tensors`, `merging` and
`broadcast` alone, I/O in `broadcast` alone."""

from rollmesh.mesh.weights.bucket_set import BucketSet, Encoding
from rollmesh.mesh.weights.digest import Digest, digest_of, manifest_digest
from rollmesh.mesh.weights.layout import ALIGNMENT, DTYPE_BYTES, BucketLayout, Placement
from rollmesh.mesh.weights.manifest import bucket_starts, check_manifest

__all__ = [
    "ALIGNMENT",
    "DTYPE_BYTES",
    "BucketLayout",
    "BucketSet",
    "Digest",
    "Encoding",
    "Placement",
    "bucket_starts",
    "check_manifest",
    "digest_of",
    "manifest_digest",
]
