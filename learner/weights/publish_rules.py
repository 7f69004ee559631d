"""The rules of publication, from the configuration."""

from __future__ import annotations

from dataclasses import dataclass

from rollmesh.mesh.config import Config
from rollmesh.mesh.config.weights import EncodingName, TransportName

VERSIONS_IN_FLIGHT = 2
"""Versions in memory in addition to `keep_versions`, at most: the next one, and an older one still being fetched."""
LINK_SHARE = 0.7
"""A delta of more than this share of a version is not kept: it is not worth its memory, nor a receiver's work."""


@dataclass(frozen=True, slots=True)
class PublishRules:
    """Rules of publication; the fields are those of `weights` in the configuration.

    Attributes:
        keep_versions: versions that stay fetchable.
        bucket_bytes: size of a bucket, the unit of transfer and of digests.
        transport: `shm`: shared memory must work; `auto`: it is used where possible; others: not.
        encoding: `full`: no deltas are made; `delta`: of every version; `auto`: on request.
        chain: deltas kept.
        adapter_scale: of the products of an adapter, where versions are adapters of a base; None: they are whole.
    """

    keep_versions: int = 2
    bucket_bytes: int = 64 << 20
    transport: TransportName = "auto"
    encoding: EncodingName = "full"
    chain: int = 4
    adapter_scale: float | None = None

    @classmethod
    def of(cls, config: Config) -> PublishRules:
        """The rules of a configuration."""
        weights = config.weights
        return cls(
            config.kept_versions,
            weights.bucket_bytes,
            weights.transport,
            weights.encoding,
            weights.chain,
            config.learner.pushed_adapter.scale if config.learner.pushed_adapter is not None else None,
        )
