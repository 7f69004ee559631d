"""The configuration of the cache of scores."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, model_validator

from rollmesh.mesh.config.base import PositiveFloat, Section
from rollmesh.mesh.config.redis_url import RedisAddress, RedisOptions, parse_redis_url
from rollmesh.mesh.errors import ConfigError

_REDIS = "reward.cache.redis"


class CacheSection(Section):
    max_bytes: int = Field(
        256 << 20, ge=0, description="Memory for scores, per process that scores; the oldest leave. 0: no cache."
    )
    functions: list[str] = Field(
        default_factory=list,
        description="Functions that are cached besides the scorers of the package: `judge`, or files with functions of "
        "your own, named as in `reward.functions`. Name those alone that give equal items equal scores.",
    )
    redis: str | None = Field(
        None,
        description="URL of a Redis that keeps scores for all services and runs, as `buffer.redis`, without cluster. "
        "None: they are kept in memory alone.",
    )
    redis_password_file: Path | None = Field(None, description="File with its password in the first line.")
    redis_timeout_s: PositiveFloat = Field(
        0.02, description="Seconds after which its answer is not waited for; the score is computed then."
    )
    redis_ttl_s: PositiveFloat = Field(7 * 86400.0, description="Seconds for which it keeps a score.")

    @property
    def address(self) -> RedisAddress | None:
        """The Redis that keeps scores; none: there is none.

        Raises:
            ConfigError: the URL cannot be read, is that of a cluster, or holds a password.
        """
        if self.redis is None:
            return None
        options = RedisOptions(password_file=self.redis_password_file)
        address = parse_redis_url(self.redis, options, key=_REDIS)
        if address.cluster:
            raise ConfigError(f"{_REDIS}: a cluster", hint="give one server: redis://, rediss:// or unix://")
        if address.password:
            raise ConfigError(
                f"{_REDIS}: it holds a password",
                hint=f"write it into a file for you alone, and name that in {_REDIS}_password_file",
            )
        return address

    @model_validator(mode="after")
    def _redis_can_be(self) -> CacheSection:
        try:
            if self.address is None and self.redis_password_file is not None:
                raise ConfigError(f"{_REDIS}_password_file without {_REDIS}", hint="it is for a Redis of your own")
        except ConfigError as error:
            raise ValueError(str(error)) from error
        return self
