"""Code that a mesh may have a generator execute, and files it may have it read: allowed by the generator's own host.

The mesh's configuration says what a generator does. Most of it is data. Settings that are code, or lead to code, are
listed here by configuration key. A generator joins only if its command line allows all of them.

Invariants: nothing of a refused configuration is loaded, started or read. Engine arguments are data only where that is
known. A text or a structure may name a class or a file, so new arguments of an engine count as code.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from rollmesh.mesh.config.base import Section
from rollmesh.mesh.config.models import Config
from rollmesh.mesh.config.reward import RewardSection
from rollmesh.mesh.config.scorers.classifier import ModelSection
from rollmesh.mesh.config.scorers.parts import uses
from rollmesh.mesh.errors import ConfigError


class AllowCode(StrEnum):
    """The code that a generator takes from its mesh."""

    NONE = "none"
    LISTED = "listed"
    ANY = "any"


@dataclass(frozen=True)
class CodeRule:
    """A generator's rule for code; `listed` counts with `AllowCode.LISTED` alone."""

    allow: AllowCode
    listed: frozenset[str] = frozenset()

    def permits(self, name: str) -> bool:
        """True if code of this name may be executed."""
        return self.allow is AllowCode.ANY or (self.allow is AllowCode.LISTED and name in self.listed)


@dataclass(frozen=True)
class CodeRequest:
    """A piece of code or a file that a configuration asks for."""

    # Configuration key.
    key: str
    # As `--code` allows it.
    name: str


def rule_of(allow: AllowCode | None, listed: Collection[str], *, is_local: bool) -> CodeRule:
    """The rule that a command line means.

    Args:
        allow: as given; none: any for a mesh of this machine, else what is listed.
        listed: names of code.
        is_local: the mesh's address is one of this machine.

    Raises:
        ConfigError: code is listed under a rule that does not look at the list.
    """
    if listed and allow in (AllowCode.NONE, AllowCode.ANY):
        raise ConfigError(f"--code {next(iter(listed))!r} has no effect with --allow-code {allow}", hint="leave one")
    if allow is None:
        allow = AllowCode.LISTED if listed else AllowCode.ANY if is_local else AllowCode.NONE
    return CodeRule(allow, frozenset(listed))


def check_code(config: Config, rule: CodeRule) -> None:
    """Refuses a configuration that asks for more than is allowed.

    Raises:
        ConfigError: names what it asks for, with its key.
    """
    refused = [asked for asked in requested_code(config) if not rule.permits(asked.name)]
    if not refused:
        return
    options = " ".join(f"--code {shlex.quote(asked.name)}" for asked in refused)
    raise ConfigError(
        "the mesh's configuration requires this generator to execute or read things that are not allowed here: "
        + "; ".join(f"{asked.key}: {asked.name}" for asked in refused),
        hint=f"if you trust it: rollmesh generator --allow-code listed {options}; or --allow-code any",
    )


def requested_code(config: Config) -> list[CodeRequest]:
    """All code that a configuration asks a generator to execute, and all files to read from its host."""
    rollout, reward = config.rollout, config.reward
    agent = rollout.agent
    found = [
        *_named("rollout.agent.program", agent.program),
        *_named("rollout.agent.environment", agent.environment),
        *_named("rollout.agent.command", shlex.join(agent.command)),
        *_named("rollout.agent.tools", *agent.tools),
        # The part of the host's environment that the command is handed.
        *_named("rollout.agent.pass_env", *agent.pass_env),
        # Read here, and sent to the address that the mesh names.
        *_named("reward.key_files", *map(str, reward.key_files.values())),
        *_named("reward.tls", *(str(tls.key) for tls in reward.tls.values() if tls.key is not None)),
    ]
    if reward.in_process:
        found += _named("reward.functions", *filter(_is_path, uses(reward.functions)))
        for functions in reward.by_data_source.values():
            found += _named("reward.by_data_source", *filter(_is_path, uses(functions)))
        found += [*_of_model("classifier", reward.classifier), *_of_model("process", reward.process)]
        found += _of_scorers(reward)
    if rollout.engine == "vllm":
        found += _named("rollout.vllm.options", *_code_options(rollout.vllm.options, _VLLM_WORDS))
    if rollout.engine == "sglang":
        for key in ("python", "key_file"):
            path = getattr(rollout.sglang, key)
            found += _named(f"rollout.sglang.{key}", None if path is None else str(path))
        found += _named("rollout.sglang.options", *_code_options(rollout.sglang.options, _SGLANG_WORDS))
    return found


def _of_model(name: str, section: ModelSection) -> Iterator[CodeRequest]:
    """The parts of a server of a reward model that are code, and the key that is sent to one at a URL."""
    for key in ("python", "api_key_file"):
        path = getattr(section, key)
        yield from _named(f"reward.{name}.{key}", None if path is None else str(path))
    words = _VLLM_WORDS if section.engine == "vllm" else _SGLANG_WORDS
    yield from _named(f"reward.{name}.options", *_code_options(section.options, words))


def _of_scorers(reward: RewardSection) -> Iterator[CodeRequest]:
    """Files of the host that scorers read and send on, write, or execute."""
    sections: dict[str, tuple[Section, tuple[str, ...]]] = {
        "judge": (reward.judge, ("api_key_file", "template", "evidence_file")),
        "cache": (reward.cache, ("redis_password_file",)),
        "isolation": (reward.isolation, ("program", "key_file")),
        "late": (reward.late, ("store",)),
    }
    for name, (section, keys) in sections.items():
        for key in keys:
            path = getattr(section, key)
            yield from _named(f"reward.{name}.{key}", None if path is None else str(path))
    yield from _named("reward.isolation.toolchains", *map(str, reward.isolation.toolchains))


def _named(key: str, *names: str | None) -> Iterable[CodeRequest]:
    return [CodeRequest(key, name) for name in names if name]


def _is_path(function: str) -> bool:
    """True if a reward function is no scorer by name, pattern or endpoint: code, or a model or schema of the host."""
    return ":" in function and "://" not in function.partition("(")[0] and not function.startswith("regex:")


# Arguments that take one of a few words.
_VLLM_WORDS = frozenset(
    {
        "attention_backend",
        "kv_cache_dtype",
        "linear_backend",
        "mamba_cache_dtype",
        "mamba_cache_mode",
        "mamba_ssm_cache_dtype",
        "mm_encoder_tp_mode",
        "moe_backend",
        "performance_mode",
        "scheduling_policy",
    }
)
_SGLANG_WORDS = frozenset(
    {
        "attention_backend",
        "decode_attention_backend",
        "fp8_gemm_runner_backend",
        "grammar_backend",
        "kv_cache_dtype",
        "log_level",
        "mamba_ssm_dtype",
        "moe_a2a_backend",
        "moe_runner_backend",
        "prefill_attention_backend",
        "sampling_backend",
        "schedule_policy",
    }
)
# Such a word: no path, no class, and nothing that a command line takes for another argument.
_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
# Switches that let code in: of a model's folder, or of requests.
_LETS_CODE_IN = frozenset({"trust_remote_code", "enable_custom_logit_processor"})


def _code_options(options: Mapping[str, Any], words: Collection[str]) -> Iterator[str]:
    """The arguments of an engine that may be code, each as `name=value`, the value as JSON."""
    for written, value in options.items():
        name = written.lstrip("-").replace("-", "_")
        is_word = isinstance(value, str) and name in words and _WORD.fullmatch(value) is not None
        # A server takes the beginning of a name for the name.
        lets_in = any(switch.startswith(name) for switch in _LETS_CODE_IN)
        # Whatever else its value is, its name alone may stand on a command line.
        is_on = value is not None and value is not False
        if (is_on and lets_in) or not (is_word or _is_plain(value)):
            yield f"{name}={json.dumps(value, default=str)}"


def _is_plain(value: Any) -> bool:
    """True if a value is made of numbers and switches alone, and so can name nothing."""
    if isinstance(value, list):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float)
