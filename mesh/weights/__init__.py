"""Versioned weights as bytes: layout in buckets, digests, manifests. No I/O, no RPC, no torch but in `tensors`."""

from mesh.weights.digest import Digest, digest_of, manifest_digest
from mesh.weights.layout import ALIGNMENT, DTYPE_BYTES, BucketLayout, Placement
from mesh.weights.manifest import bucket_offsets, check_manifest, total_bytes, verify_bucket

__all__ = [
    "ALIGNMENT",
    "DTYPE_BYTES",
    "BucketLayout",
    "Digest",
    "Placement",
    "bucket_offsets",
    "check_manifest",
    "digest_of",
    "manifest_digest",
    "total_bytes",
    "verify_bucket",
]
