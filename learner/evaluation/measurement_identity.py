"""The identity of a measurement: held-out values are comparable where it is the same."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import xxhash

from rollmesh.learner.recovery.run_identity import agent_files, files_here, fingerprint
from rollmesh.mesh.config.inputs import DataSource
from rollmesh.mesh.config.models import Config
from rollmesh.mesh.config.reward import RewardSection
from rollmesh.mesh.config.scorers.code import NAMES as CODE
from rollmesh.mesh.config.scorers.judge import NAME as JUDGE
from rollmesh.mesh.config.scorers.judge import JudgeSection
from rollmesh.mesh.config.scorers.parts import PartSection

_EVAL = {"rows", "n", "temperature", "top_p", "top_k", "right_at"}
_ROLLOUT = {"max_prompt_tokens", "max_response_tokens", "stop"}
_AGENT = {"tools", "environment", "program", "command", "max_turns", "turn_tokens", "observation_tokens"}
_DATA = {"prompt_key", "chat_template_kwargs"}
_JUDGE = {
    "model",
    "mode",
    "scale",
    "opponents",
    "votes",
    "combine",
    "structured",
    "temperature",
    "max_tokens",
    "options",
}
_SOURCE = {"name", "rows", "prompt_key", "ground_truth_key", "chat_template_kwargs", "sampling"}


def measured_by(config: Config) -> str:
    """Identity of held-out values: equal for runs with the same rewards, held-out data and sampling of responses."""
    return xxhash.xxh3_64(json.dumps(measurement(config), sort_keys=True).encode()).hexdigest()


def measurement(config: Config) -> dict[str, Any]:
    """All that held-out values depend on besides the model, by name, with files by their content.

    Addresses of reward services do not count: the same service may be elsewhere, and its contents are not known.
    """
    return {
        "data.eval": [_held_out(source) for source in config.data.eval or ()],
        **reward_measurement(config.reward, list(map(part_identity, config.reward.functions))),
        **_named("data", config.data.model_dump(mode="json", include=_DATA)),
        **_named("eval", config.eval.model_dump(mode="json", include=_EVAL)),
        **_named("rollout", config.rollout.model_dump(mode="json", include=_ROLLOUT)),
        **_named("rollout.agent", config.rollout.agent.model_dump(mode="json", include=_AGENT)),
        "rollout.agent files": [fingerprint([path]) for path in agent_files(config.rollout.agent)],
    }


def reward_measurement(reward: RewardSection, functions: Sequence[str]) -> dict[str, Any]:
    """All by which held-out responses are judged, by name.

    Args:
        reward: routes and services.
        functions: identities of the functions for all other sources.
    """
    routes = {source: list(map(part_identity, parts)) for source, parts in sorted(reward.by_data_source.items())}
    return {
        "reward.functions": list(functions),
        "reward.by_data_source": routes,
        **({"reward.normalize": dict(reward.normalize)} if reward.normalize else {}),
        "reward.endpoints": bool(reward.endpoints),
        **(_judge(reward.judge) if JUDGE in functions or reward.asks_judge else {}),
        **(_named("reward.code", reward.code.model_dump(mode="json")) if _runs_programs(reward, functions) else {}),
    }


def _runs_programs(reward: RewardSection, functions: Sequence[str]) -> bool:
    return any(name in CODE for name in (*functions, *reward.uses))


def _judge(judge: JudgeSection) -> dict[str, Any]:
    template = judge.template
    return {
        **_named("reward.judge", judge.model_dump(mode="json", include=_JUDGE)),
        "reward.judge.template": None if template is None or not template.is_file() else fingerprint([template]),
    }


def part_identity(part: str | PartSection) -> str:
    """The identity of a part of the reward: its function's, and its options where it has some."""
    if isinstance(part, str):
        return scorer_identity(part)
    options = part.model_dump(mode="json", exclude_defaults=True, exclude={"use"})
    return " ".join([scorer_identity(part.use), *([json.dumps(options, sort_keys=True)] if options else [])])


def scorer_identity(name: str) -> str:
    """The identity of a configured scorer, by its content where it is a file of the user's."""
    if "://" in name:
        return "remote"
    file, _, function = name.rpartition(":")
    return f"{fingerprint([Path(file)])}:{function}" if Path(file).is_file() else name


def _named(section: str, values: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{section}.{key}": value for key, value in values.items()}


def _held_out(source: DataSource) -> list[Any]:
    """A source of held-out data: by its content where it is here, and what decides what its rows are."""
    files = files_here(source)
    settings = source.model_dump(mode="json", include=_SOURCE, exclude_defaults=True)
    return [fingerprint(files) if files else source.path, settings]
