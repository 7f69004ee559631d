"""Settings in environment variables.

A key `a.b.c` of the configuration is `ROLLMESH__A__B__C`. An option of a service without such a key, `--ready-file`, is
`ROLLMESH_READY_FILE`. A command line goes before variables, and these before a file.

Invariants: a variable that names no key is refused, and so is one that is nearly an option's: it would be ignored in
silence. The services that a launcher starts see none of these, since their files and command lines hold all settings.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping

from rollmesh.mesh.config.base import Section
from rollmesh.mesh.config.models import Config
from rollmesh.mesh.config.network import NetworkSection, SecuritySection
from rollmesh.mesh.config.trainers.configs import DpoConfig, RewardModelConfig, SftConfig
from rollmesh.mesh.errors import ConfigError

_KEY, _OPTION, _PARTS = "ROLLMESH__", "ROLLMESH_", "__"
OPTIONS = (
    "mesh",
    "join",
    "port",
    "ready-file",
    "member-id",
    "threads",
    "shares-devices",
    "allow-code",
    "code",
    "takeover",
    "allow-changes",
    "from-checkpoint",
    "node",
    "weights",
    "log-probs",
    "notice",
    "drain",
    "once",
)
"""Options of services that are no keys of the configuration."""
# Likeness, beyond the prefix that all share, at which a variable is taken for a misspelled option.
_NEAR = 0.75
# Sections of a host. Commands that take the rest of the configuration from the mesh read these alone.
_OF_HOST: dict[str, type[Section]] = {"network": NetworkSection, "security": SecuritySection}
_SECTIONS = {name for model in (Config, SftConfig, RewardModelConfig, DpoConfig) for name in model.model_fields}


def key_variable(key: str) -> str:
    """`network.host` -> `ROLLMESH__NETWORK__HOST`."""
    return f"{_KEY}{key.replace('.', _PARTS).upper()}"


def option_variable(option: str) -> str:
    """`ready-file` -> `ROLLMESH_READY_FILE`.

    Args:
        option: one of `OPTIONS`.
    """
    return f"{_OPTION}{option.replace('-', '_').upper()}"


def overrides_from(environment: Mapping[str, str]) -> list[str]:
    """The keys that variables set, as overrides of a command line."""
    return [f"--{_key_of(name)}={environment[name]}" for name in _key_variables(environment)]


def without_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """An environment without all of these variables."""
    settings = {*_key_variables(environment), *map(option_variable, OPTIONS)}
    return {name: value for name, value in environment.items() if name not in settings}


def check_variables(environment: Mapping[str, str]) -> None:
    """Refuses variables that would be ignored in silence.

    Raises:
        ConfigError: one of no key or section, or one whose name is nearly an option's.
    """
    for name in _key_variables(environment):
        if (meant := _refused(_key_of(name))) is not None:
            raise ConfigError(
                f"environment variable {name} is no key of the configuration"
                + (f", did you mean {key_variable(meant)}?" if meant else ""),
                hint="`rollmesh config schema` lists every key; a.b is ROLLMESH__A__B",
            )
    options = {option_variable(option).removeprefix(_OPTION): option for option in OPTIONS}
    for name in environment:
        rest = name.removeprefix(_OPTION)
        if not name.startswith(_OPTION) or name.startswith(_KEY) or rest in options:
            continue
        if near := difflib.get_close_matches(rest, options, n=1, cutoff=_NEAR):
            raise ConfigError(f"unknown environment variable {name}, did you mean {_OPTION}{near[0]}?")


def _refused(key: str) -> str | None:
    """The key that an unknown one is nearest to, empty without one; None: its section takes it, or will refuse it."""
    section, _, rest = key.partition(".")
    if section not in _SECTIONS:
        near = difflib.get_close_matches(section, _SECTIONS, n=1)
        return f"{near[0]}.{rest}" if near else ""
    fields = _OF_HOST[section].model_fields if section in _OF_HOST else {}
    if not fields or not rest or rest in fields:
        return None
    near = difflib.get_close_matches(rest, fields, n=1)
    return f"{section}.{near[0]}" if near else ""


def _key_variables(environment: Mapping[str, str]) -> Iterator[str]:
    return (name for name in sorted(environment) if name.startswith(_KEY))


def _key_of(name: str) -> str:
    return name.removeprefix(_KEY).replace(_PARTS, ".").lower()
