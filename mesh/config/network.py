"""The configuration of addresses, deadlines, keys and TLS."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, model_validator

from rollmesh.mesh.config.base import PositiveFloat, PositiveInt, Section


class NetworkSection(Section):
    host: str = Field("127.0.0.1", description="Address to which services bind.")
    port: int = Field(0, ge=0, le=65535, description="Port of the buffer (the mesh address); 0 picks a free one.")
    advertise: str | None = Field(None, description="Host under which others reach this machine, if not `host`.")
    metrics: bool = Field(True, description="Serve Prometheus metrics over HTTP, on a port of each service.")
    metrics_host: str = Field(
        "127.0.0.1", description="Address to which metrics bind, independent of `host`; off loopback they need a key."
    )
    metrics_port: int = Field(
        0, ge=0, le=65535, description="Port of the metrics, where each service has a host of its own; 0: a free one."
    )
    max_message_mb: PositiveInt = Field(64, description="Largest RPC message, in MiB.")
    rpc_timeout_s: PositiveFloat = Field(15.0, description="Deadline of a unary call, in seconds.")
    retry_s: PositiveFloat = Field(60.0, description="Seconds for which a service retries a lost peer before it exits.")


class SecuritySection(Section):
    token_file: Path | None = Field(
        None,
        description="File with the mesh's token, or with a grant of it (`rollmesh token`); none: `rollmesh run` makes "
        "one in the run folder.",
    )
    endpoint_key_file: Path | None = Field(
        None,
        description="File with the API key of the generators' HTTP endpoints; none: `rollmesh run` makes one in the "
        "run folder.",
    )
    metrics_key_file: Path | None = Field(
        None,
        description="File with the key (bearer token) of the services' metrics; none: `rollmesh run` makes one in the "
        "run folder.",
    )
    telemetry_key_file: Path | None = Field(
        None,
        description="File with the key (bearer token) that the collector of traces (`telemetry.otlp`) asks for; none: "
        "it asks for none.",
    )
    tls_cert: Path | None = Field(None, description="PEM certificate of the services; needs `tls_key`.")
    tls_key: Path | None = Field(None, description="PEM key of the services.")
    tls_ca: Path | None = Field(None, description="PEM certificate authority of the services that clients trust.")
    tls_client_ca: Path | None = Field(
        None,
        description="PEM certificate authority of the certificates that clients must show; none: clients need "
        "no certificate.",
    )
    allow_insecure: bool = Field(
        False,
        description="Allow listeners that others on the network can reach unprotected; otherwise each is "
        "refused. Off loopback these are services without a token, and metrics and endpoints "
        "without a key. Broadcasts of weights (`gloo`, `nccl`, SGLang's `distributed`) and ranks "
        "of several machines are also among them. On all addresses they are the store of "
        "torchrun, and SGLang's `data_parallel`.",
    )

    @model_validator(mode="after")
    def _whole_tls(self) -> SecuritySection:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key belong together: one of them alone encrypts nothing")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise ValueError("tls_client_ca needs tls_cert and tls_key: clients' certificates come with TLS alone")
        return self
