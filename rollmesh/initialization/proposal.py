"""From what was found to settings, each with the reason for it: pure decisions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rollmesh.initialization.inputs import DataLook, MachineLook, ModelLook
from rollmesh.mesh.errors import ConfigError

_MOST_RESPONSE_TOKENS = 1024
_CONTEXT = 4096
# Learning rate by the number of parameters from which it holds.
_RATES = ((100e6, 1.0e-6), (10e6, 1.0e-5), (1e6, 1.0e-4), (0, 3.0e-4))


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting of the configuration.

    Attributes:
        key: with dots.
        value: as YAML.
        comment: the reason, and what else it could be.
    """

    key: str
    value: Any
    comment: str = ""


@dataclass(frozen=True, slots=True)
class Wishes:
    """The choices of a user.

    Attributes:
        name: of the run.
        eval: held-out data; None without any.
        rewards: scorers or import paths; empty: to be found.
    """

    name: str
    eval: str | None = None
    rewards: Sequence[str] = ()


def propose(
    model: ModelLook,
    data: DataLook,
    machine: MachineLook,
    wishes: Wishes,
    knows: Callable[[str], bool],
) -> list[Setting]:
    """The settings of a configuration.

    Args:
        model, data, machine: as found.
        wishes: of the user.
        knows: whether a built-in scorer knows a data_source.

    Raises:
        ConfigError: no reward can be found for the rows.
    """
    return [
        Setting("run.name", wishes.name, "The run's folder is runs/NAME; the same name continues the run."),
        *_model(model, machine),
        *_data(data, wishes),
        Setting("algorithm", "grpo", "`rollmesh config algorithms` lists all of them; docs/algorithms.md explains."),
        _reward(data, wishes, knows),
        *_rollout(model, data, machine),
        *_learner(model, machine, wishes),
        Setting("buffer.max_staleness", 4, "No trained token is older than this many versions; 0 is on-policy."),
    ]


def _model(model: ModelLook, machine: MachineLook) -> Iterator[Setting]:
    size = f"{model.parameters / 1e6:.3g} M parameters" if model.parameters else "A hub id is fetched at the start"
    context = f", {model.context} tokens of context" if model.context else ""
    yield Setting("model.path", model.path, f"{size}{context}.")
    if machine.devices:
        yield Setting("model.dtype", "bfloat16", "Generators compute and weights travel in it; float32 on a CPU.")


def _data(data: DataLook, wishes: Wishes) -> Iterator[Setting]:
    form = "verl's fields" if data.verl else "TRL's columns"
    kind = "chat messages" if data.chats else "texts"
    usual = data.truth_key in (None, "ground_truth", "answer", "solution")
    source: Any = data.path if usual else {"path": data.path, "ground_truth_key": data.truth_key}
    yield Setting("data.train", source, f"{data.rows} rows with {form}; prompts are {kind}.")
    held_out: Any = wishes.eval if usual or wishes.eval is None else {**source, "path": wishes.eval}
    yield Setting("data.eval", held_out, "Held-out rows; without them nothing says whether the model gets better.")
    if data.prompt_key != "prompt":
        yield Setting("data.prompt_key", data.prompt_key, "Field with the prompt.")


def _reward(data: DataLook, wishes: Wishes, knows: Callable[[str], bool]) -> Setting:
    own = "A function of your own is FILE.py:FUNCTION, with verl's or TRL's signature."
    if wishes.rewards:
        return Setting("reward.functions", list(wishes.rewards), own)
    if data.sources and all(map(knows, data.sources)):
        return Setting("reward.functions", ["auto"], f"It knows {', '.join(data.sources)}. {own}")
    if data.verl or data.truth_key is not None:
        truth = "reward_model.ground_truth" if data.verl else data.truth_key
        return Setting("reward.functions", ["exact_match"], f"1 where the response equals `{truth}`. {own}")
    raise ConfigError(
        f"{data.path}: rows have no ground truth that a response could be compared with",
        hint="give --reward FILE.py:FUNCTION, with the signature of verl or of TRL",
    )


def _rollout(model: ModelLook, data: DataLook, machine: MachineLook) -> Iterator[Setting]:
    context = model.context or _CONTEXT
    prompt = _rounded(data.longest * 1.25) if data.longest else context // 4
    prompt = min(prompt, max(1, context * 3 // 4))
    response = min(_MOST_RESPONSE_TOKENS, context - prompt)
    engines = "hf, vllm or sglang; the latter two are faster and have environments of their own (docs/engines.md)."
    yield Setting("rollout.engine", "hf", engines)
    yield Setting("rollout.n", 8, "Responses to each prompt, which are compared with each other.")
    longest = f"The longest of the first rows has {data.longest}; " if data.longest else ""
    yield Setting(
        "rollout.max_prompt_tokens",
        prompt,
        f"{longest}longer prompts are skipped." if longest else "Longer prompts are skipped.",
    )
    yield Setting("rollout.max_response_tokens", response, f"Both together are at most the context, {context}.")
    yield Setting("rollout.replicas", max(1, machine.devices // 2), "Generators that are started here.")


def _learner(model: ModelLook, machine: MachineLook, wishes: Wishes) -> Iterator[Setting]:
    if machine.devices > 1:
        ranks = machine.devices - machine.devices // 2
        yield Setting("learner.ranks", ranks, f"Of {machine.devices} devices; generators have the others.")
    elif machine.devices:
        yield Setting("placement", "collocated", "Learner and generators take turns on the one device.")
    rate = next(rate for least, rate in _RATES if (model.parameters or 1e9) >= least)
    yield Setting("learner.steps", 200, "One step trains one batch and publishes one version.")
    groups = 32 if machine.devices else 16
    yield Setting("learner.batch.groups", groups, "Prompts of a step, each with its responses.")
    yield Setting("learner.optimizer.lr", rate, "For a model of this size; lower it where the reward falls.")
    yield Setting(
        "learner.optimizer.warmup_steps", 10, "The first steps of AdamW are as long as its rate, whatever the gradient."
    )
    if wishes.eval is not None:
        yield Setting("eval.every_steps", 20, "The first and the last version are always evaluated.")
    yield Setting("checkpoint.every_s", 600, "Seconds; the same command continues from the newest one.")


def _rounded(tokens: float) -> int:
    """The next multiple of 16."""
    return max(16, -(-int(tokens) // 16) * 16)
