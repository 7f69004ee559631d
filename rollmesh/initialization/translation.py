"""A configuration of verl or TRL as settings of ours; the table of `mesh.config.foreign` says what stands for what.

A few keys follow from several of theirs, which a table cannot say: these are computed here. Whatever this version does
not take becomes a note.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rollmesh.initialization.proposal import Setting
from rollmesh.learner.builders import build_algorithm
from rollmesh.mesh.config import load_config, parse_overrides
from rollmesh.mesh.config.foreign.answers import Answer, answers
from rollmesh.mesh.config.models import Config
from rollmesh.mesh.config.yaml_text import in_line
from rollmesh.mesh.errors import RollmeshError

_MINIMAL: dict[str, Any] = {"model": {"path": "m"}, "data": {"train": "t"}}
# A value of OmegaConf that is another key's, or has to be given.
_OPEN = ("${", "???")
_TRACKERS = ("wandb", "mlflow", "trackio", "tensorboard")
_Values = Mapping[str, Any]


def translate(values: Mapping[str, Any]) -> tuple[list[Setting], list[str]]:
    """The settings that stand for a configuration, and notes on what was not taken over.

    Args:
        values: of verl's or TRL's configuration, nested.
    """
    found = answers(values, Config.model_fields)
    theirs = {answer.key: answer.value for answer in found if not _is_open(answer.value)}
    settings, notes = [], []
    taken: set[str] = set()
    for keys, make in _COMPUTED:
        if keys[0] in theirs and (made := make(theirs)):
            taken |= {key for key in theirs if key in keys or key.startswith(tuple(f"{one}." for one in keys))}
            settings += [
                Setting(key, value, f"From {', '.join(key for key in keys if key in theirs)}.") for key, value in made
            ]
    for answer in found:
        if answer.key in taken or answer.key not in theirs:
            continue
        if answer.setting is not None:
            settings += [
                Setting(key, value, f"From {answer.key}.") for key, value in parse_overrides([answer.setting]).items()
            ]
        elif answer.row is not None and not (answer.row.same and answer.value is False):
            notes.append(f"Not taken over: {answer.key}; here: {answer.text}")
    accepted, refused = _accepted(_once(settings))
    return accepted, [*refused, *notes, *_unknown(found, theirs)]


def _accepted(settings: Sequence[Setting]) -> tuple[list[Setting], list[str]]:
    """The settings that go together with those before them, the algorithm first; and notes on the others.

    Settings that the algorithm does not have and that were off need no note.
    """
    kept: list[Setting] = []
    notes = []
    for setting in sorted(settings, key=lambda one: one.key != "algorithm"):
        try:
            build_algorithm(load_config(_MINIMAL, [f"{one.key}={in_line(one.value)}" for one in (*kept, setting)]))
        except RollmeshError as error:
            if not setting.value:
                continue
            notes.append(f"Not taken over: {setting.comment.removeprefix('From ').rstrip('.')}: {error.message}")
        else:
            kept.append(setting)
    return kept, notes


def _once(settings: Sequence[Setting]) -> list[Setting]:
    """Each key once; the first one stays."""
    found: dict[str, Setting] = {}
    for setting in settings:
        found.setdefault(setting.key, setting)
    return list(found.values())


def _unknown(found: Sequence[Answer], theirs: _Values) -> Iterator[str]:
    if keys := [answer.key for answer in found if answer.row is None and answer.key in theirs]:
        yield f"Nothing is known to stand for {', '.join(keys)}."


def _is_open(value: Any) -> bool:
    return value is None or value in ({}, []) or (isinstance(value, str) and value.startswith(_OPEN))


def _reward_function(section: str) -> Callable[[_Values], list[tuple[str, Any]]]:
    def make(theirs: _Values) -> list[tuple[str, Any]]:
        name = theirs.get(f"{section}.name", "compute_score")
        given = f"{section}.reward_kwargs."
        arguments = [f"{key.removeprefix(given)}={theirs[key]!r}" for key in theirs if key.startswith(given)]
        function = f"{theirs[f'{section}.path']}:{name}" + (f"({', '.join(arguments)})" if arguments else "")
        return [("reward.functions", [function])]

    return make


def _minibatches(theirs: _Values) -> list[tuple[str, Any]]:
    whole, part = theirs.get("data.train_batch_size"), theirs["actor_rollout_ref.actor.ppo_mini_batch_size"]
    divides = isinstance(whole, int) and isinstance(part, int) and part > 0 and whole % part == 0
    return [("learner.batch.minibatches", whole // part)] if divides and whole is not None else []


def _clip(theirs: _Values) -> list[tuple[str, Any]]:
    ratio = theirs["actor_rollout_ref.actor.clip_ratio"]
    own = {
        "algorithm.loss.clip_low": theirs.get("actor_rollout_ref.actor.clip_ratio_low", ratio),
        "algorithm.loss.clip_high": theirs.get("actor_rollout_ref.actor.clip_ratio_high", ratio),
    }
    return list(own.items())


def _trackers(key: str) -> Callable[[_Values], list[tuple[str, Any]]]:
    def make(theirs: _Values) -> list[tuple[str, Any]]:
        named = theirs[key] if isinstance(theirs[key], list) else [theirs[key]]
        return [(f"logging.{name}", True) for name in _TRACKERS if name in named]

    return make


def _groups(theirs: _Values) -> list[tuple[str, Any]]:
    each, steps = theirs["per_device_train_batch_size"], theirs.get("gradient_accumulation_steps", 1)
    groups = each * steps // theirs.get("num_generations", 8)
    return [("learner.batch.groups", groups)] if groups else []


def _kl(theirs: _Values) -> list[tuple[str, Any]]:
    return [("algorithm.kl.where", "loss"), ("algorithm.kl.coefficient", theirs["beta"])] if theirs["beta"] else []


def _dtype(theirs: _Values) -> list[tuple[str, Any]]:
    return [("model.dtype", "bfloat16")] if theirs["bf16"] is True else []


# Keys of theirs, the first of which has to be there, and what is made of all of them.
_COMPUTED: tuple[tuple[tuple[str, ...], Callable[[_Values], list[tuple[str, Any]]]], ...] = (
    *(
        ((f"{section}.path", f"{section}.name", f"{section}.reward_kwargs"), _reward_function(section))
        for section in ("custom_reward_function", "reward.custom_reward_function")
    ),
    (("actor_rollout_ref.actor.ppo_mini_batch_size",), _minibatches),
    (
        (
            "actor_rollout_ref.actor.clip_ratio",
            "actor_rollout_ref.actor.clip_ratio_low",
            "actor_rollout_ref.actor.clip_ratio_high",
        ),
        _clip,
    ),
    (("trainer.logger",), _trackers("trainer.logger")),
    (("report_to",), _trackers("report_to")),
    (("per_device_train_batch_size", "gradient_accumulation_steps"), _groups),
    (("beta",), _kl),
    (("bf16",), _dtype),
)
