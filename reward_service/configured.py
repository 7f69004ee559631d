"""Scorers with a section of the configuration: their names, and what each becomes in a process that scores.

A name stands for one function in all sources, so that limits and budgets count for the process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rollmesh.mesh.config.reward import RewardSection
from rollmesh.mesh.config.scorers import classifier, code, judge, process
from rollmesh.mesh.errors import ConfigError
from rollmesh.reward_service.composition.part import Entry, Part
from rollmesh.reward_service.scorers import auto

Function = Callable[..., Any]
Functions = Sequence[Entry]


def _judge(reward: RewardSection) -> Function:
    if reward.judge.base_url is None or reward.judge.model is None:
        raise ConfigError(judge.NEEDS, hint="see docs/judge.md")
    # Only here: few runs need a client of HTTP.
    from rollmesh.reward_service.judge.judge import Judge

    return Judge(reward.judge, call_timeout_s=reward.scorer_timeout_s)


def _code(name: str) -> Callable[[RewardSection], Function]:
    def build(reward: RewardSection) -> Function:
        from rollmesh.reward_service.code.scorer import Code

        return Code(reward, name, fraction=name == "code_fraction")

    return build


def _automatic_code(reward: RewardSection) -> Function:
    from rollmesh.reward_service.code.automatic import AutomaticCode

    return AutomaticCode(reward)


def _classifier(reward: RewardSection) -> Function:
    from rollmesh.reward_service.classifier.classifier import Classifier

    return Classifier(classifier.NAME, reward.classifier, call_timeout_s=reward.scorer_timeout_s)


def _reward_model(reward: RewardSection, name: str) -> Function:
    """The scorer `model:FOLDER`: the classifier's section with another model, read as `rollmesh rm` trains."""
    from rollmesh.reward_service.classifier.classifier import Classifier

    folder = Path(name.removeprefix(classifier.FOLDER_PREFIX)).expanduser()
    section = reward.classifier.model_copy(update={"model": str(folder), "template": "text"})
    return Classifier("reward_model", section, call_timeout_s=reward.scorer_timeout_s)


def _process(reward: RewardSection) -> Function:
    from rollmesh.reward_service.process.process import ProcessRewards

    return ProcessRewards(reward.process, call_timeout_s=reward.scorer_timeout_s)


BUILDERS: Mapping[str, Callable[[RewardSection], Function]] = MappingProxyType(
    {
        **{name: _code(name) for name in code.NAMES},
        judge.NAME: _judge,
        classifier.NAME: _classifier,
        process.NAME: _process,
    }
)
"""Name -> builder of its function, from the section of rewards. A builder imports what only its scorer needs."""


def is_configured(name: str) -> bool:
    """True if a name stands for such a scorer: one of `BUILDERS`, or `model:FOLDER`."""
    return name in BUILDERS or name.startswith(classifier.FOLDER_PREFIX)


def with_configured(
    reward: RewardSection, functions: Functions, by_data_source: Mapping[str, Functions]
) -> tuple[Functions, Mapping[str, Functions]]:
    """Parts and parts by source, in which each such name is its function.

    Where `auto` stands for a source of programs, it is the function that runs them.

    Args:
        reward: of the run.
        functions, by_data_source: as of `reward_service.scoring.engine`.

    Raises:
        ConfigError: a scorer's section lacks something, or names a file that cannot be read.
        RewardError: a scorer cannot be built.
    """
    built: dict[str, Function] = {}

    def put_in(entry: Entry, source: str | None = None) -> Part:
        part = Part.of(entry)
        name = part.use
        if name == "auto" and source in auto.CODE_SOURCES:
            if name not in built:
                built[name] = _automatic_code(reward)
            return part.with_use(built[name])
        if not isinstance(name, str) or not is_configured(name):
            return part
        if name not in built:
            built[name] = BUILDERS[name](reward) if name in BUILDERS else _reward_model(reward, name)
        return part.with_use(built[name])

    parts = list(map(put_in, functions))
    programs = dict.fromkeys(auto.CODE_SOURCES, parts) if any(part.use == "auto" for part in parts) else {}
    sources = {**programs, **by_data_source}
    return parts, {source: [put_in(entry, source) for entry in own] for source, own in sources.items()}
