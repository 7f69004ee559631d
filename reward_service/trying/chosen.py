"""The scorer of a trial: that of a configuration, some functions, or a reward service."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rollmesh.mesh.config.load import load_config
from rollmesh.mesh.config.models import Config
from rollmesh.mesh.errors import ConfigError
from rollmesh.reward_service.client.client import RewardScorer, build_scorer

# A trial trains nothing.
NOTHING: dict[str, Any] = {"model": {"path": "none"}, "data": {"train": "none.jsonl"}}


def chosen_scorer(
    config: Config | None = None,
    *,
    functions: Sequence[str] = (),
    endpoint: str | None = None,
    key_file: Path | None = None,
) -> RewardScorer:
    """A scorer; call it on the event loop that will use it.

    Functions run in this process and in workers of its own, with the deadlines of the configuration. Its endpoints are
    asked where it has any.

    Args:
        config: of the run; None: the defaults.
        functions: in place of those of the configuration; their sum counts.
        endpoint: a reward service in place of the configuration's.
        key_file: with the key that is sent to it.

    Raises:
        ConfigError: functions and an endpoint, a malformed endpoint, or a scorer that lacks its settings.
        RewardError: a function that does not exist.
    """
    if functions and endpoint is not None:
        raise ConfigError("--function and --endpoint exclude each other", hint="give one of them")
    base = config or load_config(NOTHING)
    reward: dict[str, Any] = {}
    if functions:
        reward = {"functions": list(functions), "by_data_source": {}, "endpoints": []}
    elif endpoint is not None:
        reward = {"endpoints": [endpoint], "by_data_source": {}}
        reward["key_files"] = {endpoint: key_file} if key_file is not None else {}
    given = {**base.reward.model_dump(), **reward}
    given["in_process"] = not given["endpoints"]
    try:
        section = type(base.reward).model_validate(given)
    except ValidationError as error:
        problems = "; ".join(item["msg"].removeprefix("Value error, ") for item in error.errors())
        raise ConfigError(problems, hint="set it in a configuration, and name that with --config") from error
    return build_scorer(base.model_copy(update={"reward": section}))
