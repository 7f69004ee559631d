"""The configuration of weight transfers from the learner to generators."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from rollmesh.mesh.config.base import PositiveFloat, PositiveInt, Section

TransportName = Literal["auto", "grpc", "shm", "gloo", "nccl", "disk"]
EncodingName = Literal["auto", "full", "delta"]


class WeightsSection(Section):
    transport: TransportName = Field(
        "auto",
        description="auto: shm on the same host, else grpc; shm, grpc: that one only; gloo, nccl (broadcast), "
        "disk: that one, and grpc if it fails.",
    )
    dir: Path | None = Field(None, description="Folder for transport disk; shared by all hosts of the run.")
    encoding: EncodingName = Field(
        "auto",
        description="full: all bytes of a version; delta: lossless deltas wherever they are smaller; auto: "
        "deltas for receivers that get them faster over their network.",
    )
    chain: PositiveInt = Field(4, description="Deltas kept for receivers of earlier versions.")
    kv: Literal["auto", "keep", "recompute", "interrupt"] = Field(
        "auto",
        description="Running sequences at a swap: keep their KV cache; recompute it, all at once; or "
        "interrupt them. Interrupted ones continue from their tokens, prefilled again over "
        "several steps. With auto it is keep; with sglang recompute, unless adapters are served, "
        "since keep turns off the overlap of its scheduler with the device.",
    )
    bucket_bytes: PositiveInt = Field(64 << 20, description="Bytes per bucket.")
    keep_versions: PositiveInt | None = Field(
        None,
        description="Published versions that stay fetchable; one that is being fetched over grpc stays too. These, up "
        "to two more with the next, are in the learner's memory, with transport auto or shm in /dev/shm. None: 2, and "
        "1 where all generators take turns with the learner.",
    )
    streams: PositiveInt = Field(
        2, description="Buckets that are transferred over grpc at once, each on its own connection."
    )
    fanout: PositiveInt = Field(
        2,
        description="Number of generators to which the learner, and each of these in turn, sends a version over grpc.",
    )
    timeout_s: PositiveFloat = Field(
        120.0, description="Seconds without a byte after which a transfer has failed; a slow one may take longer."
    )

    @model_validator(mode="after")
    def _disk_has_a_folder(self) -> WeightsSection:
        if self.transport == "disk" and self.dir is None:
            raise ValueError("transport disk needs dir, a folder that learner and generators share")
        return self

    @model_validator(mode="after")
    def _deltas_have_a_transport(self) -> WeightsSection:
        if self.transport == "shm" and self.encoding == "delta":
            raise ValueError("encoding delta travels over grpc, which transport shm rules out; take auto for either")
        return self
