"""The configuration of the replay buffer: Redis, off-policy rules, leases, stored bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from rollmesh.mesh.config.base import PositiveFloat, PositiveInt, Section
from rollmesh.mesh.config.redis_url import RedisOptions, parse_redis_url
from rollmesh.mesh.errors import ConfigError

# Orders of sampling by name.
ORDERS = ("in_order", "fifo", "freshest", "priority")


class BufferSection(Section):
    redis: str | None = Field(
        None,
        description="Redis URL (`redis://`, `rediss://`, `unix://`, `redis-cluster://`, `rediss-cluster://`); it "
        "may name a user, but no password. None: a redis-server is started in the run folder.",
    )
    redis_password_file: Path | None = Field(None, description="File with Redis' password in its first line.")
    redis_tls_ca: Path | None = Field(
        None, description="PEM certificate authorities for Redis' certificate; none: the system's."
    )
    redis_tls_cert: Path | None = Field(None, description="PEM certificate that is shown to Redis.")
    redis_tls_key: Path | None = Field(None, description="PEM key of `redis_tls_cert`.")
    redis_tls_check_hostname: bool = Field(True, description="Redis' certificate must name the host of the URL.")
    python: Path | None = Field(None, description="Interpreter of the fronts; none: that of `rollmesh`.")
    fronts: PositiveInt = Field(1, description="Fronts that `rollmesh run` starts; all serve the same Redis.")
    durability: Literal["always", "everysec", "none"] = Field(
        "always",
        description="Writes that survive when the embedded Redis ends. `always`: every acknowledged write, "
        "even if the machine fails. `everysec`: all but up to about two seconds of them, at a "
        "power cut or with a slow disk. `none`: nothing (benchmarks, throw-away runs). Lost "
        "writes are replaced: finished responses are sampled again, and the learner reports again "
        "which groups it has used. Nothing hangs, and nothing is trained twice.",
    )
    max_staleness: int = Field(4, ge=0, description="No trained token is older than this many versions (S).")
    commit: Literal["checkpoint", "step"] = Field(
        "checkpoint",
        description="When a used group counts as trained: with the checkpoint, or once the step's version is "
        "in force (at-most-once).",
    )
    order: str = Field(
        "in_order",
        description="Order in which ready groups train. in_order: as admitted, waiting for stragglers rather "
        "than dropping them; fifo: as sealed; freshest: newest tokens first. With priority they "
        "are sampled in proportion to their priorities. `module:function` / `file.py:function`: "
        "highest score first, by a function of your own "
        "(rollmesh.buffer.policy.batch_selection.GroupFacts -> float).",
    )
    max_reuse: PositiveInt = Field(
        1, description="Uses of a group at most (R), one per version; at most `max_staleness` + 1."
    )
    samples_per_insert: PositiveInt | None = Field(
        None, description="Uses per group that the gate counts on, with `max_reuse` above 1; none: all R."
    )
    priority: str = Field(
        "uniform",
        description="Priority of a group after a use, with `order: priority` (new groups have 1): uniform; "
        "reward_std; or `module:function` / `file.py:function` of your own "
        "(rollmesh.learner.algorithms.types.Group -> float).",
    )
    priority_exponent: float = Field(
        1.0, ge=0, description="Weight of a draw = priority to this power, with `order: priority`; 0: uniform."
    )
    min_members: PositiveInt = Field(2, description="Scored members below which a sealed group fails.")
    max_bytes: PositiveInt = Field(1 << 30, description="Payload bytes above which nothing more is admitted.")
    lease_s: PositiveFloat = Field(15.0, description="Lease term in seconds; heartbeats renew it.")
    reconnect_grace_s: PositiveFloat = Field(
        3.0, description="Seconds that are left of a lease when its stream breaks."
    )
    stall_s: PositiveFloat = Field(
        60.0,
        description="Seconds for which the learner waits without progress of any group. After that the log, "
        "`rollmesh status` and the report show what each service holds, and since when.",
    )
    stall_limit_s: float = Field(
        1800.0,
        ge=0,
        description="Seconds after which such a run ends with a named error (exit code 12); 0: never. Time in which a "
        "first generator loads its model does not count. A learner may load its models for as long, 600 s at least.",
    )
    seed_ahead: PositiveInt = Field(4, description="Prompt tasks kept ready, in batches.")
    compression: Literal["none", "zstd"] = Field(
        "none",
        description="Compression of token ids and log-probs by generators; zstd makes them 1.2 to 2 times smaller.",
    )
    compression_level: int = Field(1, ge=1, le=19, description="Level of zstd; above 1 there is little gain.")
    side_dir: Path | None = Field(
        None,
        description="Folder for large data outside the payloads (routed experts, images), the same for all fronts; "
        "none: `side` in the run folder.",
    )
    side_max_bytes: PositiveInt = Field(1 << 30, description="Bytes of one object of side data at most.")

    @property
    def redis_options(self) -> RedisOptions:
        """Settings of Redis in addition to its URL."""
        return RedisOptions(
            tls_ca=self.redis_tls_ca,
            tls_cert=self.redis_tls_cert,
            tls_key=self.redis_tls_key,
            check_hostname=self.redis_tls_check_hostname,
            password_file=self.redis_password_file,
        )

    @model_validator(mode="after")
    def _redis_can_be(self) -> BufferSection:
        try:
            if self.redis is not None:
                address = parse_redis_url(self.redis, self.redis_options)
                if address.password:
                    raise ConfigError(
                        "buffer.redis: it holds a password",
                        hint="write it into a file for you alone, and name that in buffer.redis_password_file",
                    )
            elif self.redis_options != RedisOptions():
                raise ConfigError("buffer.redis_* without buffer.redis", hint="they are for a Redis of your own")
        except ConfigError as error:
            raise ValueError(str(error)) from error
        return self

    @model_validator(mode="after")
    def _reuse_fits(self) -> BufferSection:
        if ":" not in self.order and self.order not in ORDERS:
            raise ValueError(f"order: expected one of {', '.join(ORDERS)} or a path with `:`, got {self.order!r}")
        if self.max_reuse > self.max_staleness + 1:
            raise ValueError(
                f"max_reuse ({self.max_reuse}) exceeds max_staleness + 1 ({self.max_staleness + 1}): a group is used "
                "at most once per version, and ends with the bound"
            )
        if ":" not in self.priority and self.priority not in ("uniform", "reward_std"):
            raise ValueError(f"priority: expected uniform, reward_std or a path with `:`, got {self.priority!r}")
        if self.samples_per_insert is not None and not self.samples_per_insert <= self.max_reuse > 1:
            raise ValueError("samples_per_insert goes with max_reuse above 1, and is at most that")
        return self
