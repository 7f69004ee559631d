"""Questions to a judging model: options by the configuration, messages by the item."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from rollmesh.mesh.config.scorers.classifier import ClassifierSection
from rollmesh.mesh.config.scorers.process import ProcessSection
from rollmesh.mesh.errors import ConfigError
from rollmesh.mesh.private_files import read_secret
from rollmesh.reward_service.outcomes import RewardItem
from rollmesh.reward_service.served_model.messages import Kind, ModelOptions

# Raised whenever the same model may judge an answer in another way; fields on which its scores depend.
_VERSION = 1
_JUDGED_BY = {"template", "label", "activation", "steps", "total", "per_step", "separator", "good", "bad", "system"}
# The share of a call's time for one request to a server elsewhere: less than silence may last.
_REQUEST_SHARE = 0.4


def model_options(section: ClassifierSection | ProcessSection, kind: Kind, call_timeout_s: float) -> ModelOptions:
    """Options of a model.

    Args:
        section: of the configuration.
        kind: what is wanted of it.
        call_timeout_s: seconds in which a call has to end.

    Raises:
        ConfigError: there is no model, or its key cannot be read.
    """
    if section.model is None:
        name = "process" if isinstance(section, ProcessSection) else "classifier"
        raise ConfigError(f"the scorer `{name}` needs reward.{name}.model", hint="see docs/reward-models.md")
    steps: dict[str, str] = {}
    if isinstance(section, ProcessSection):
        steps = {name: getattr(section, name) for name in ("separator", "good", "bad", "system")}
    return ModelOptions(
        kind=kind,
        folder=section.model,
        engine=section.engine,
        url=section.url or "",
        key=read_secret(section.api_key_file, "api_key_file") if section.api_key_file is not None else "",
        python="" if section.python is None else str(section.python.expanduser()),
        server_options=section.options,
        timeout_s=_REQUEST_SHARE * call_timeout_s,
        device=section.device or "",
        dtype=section.dtype,
        max_tokens=section.max_tokens_per_batch,
        max_wait_s=section.max_wait_ms / 1000,
        template=section.template or "",
        label=section.label or "",
        activation=section.activation,
        **steps,
    )


def version_of(options: ModelOptions) -> str:
    """Changes with the options and with each file of the model's folder; a server elsewhere is taken at its word."""
    files = sorted(path for path in Path(options.folder).iterdir() if path.is_file())
    states = [(path.name, found.st_size, found.st_mtime_ns) for path in files if (found := path.stat())]
    return repr((options, states))


def told_version(section: ClassifierSection | ProcessSection) -> str:
    """A name of a model's scores for people: another model, template or label makes another one, another host does not.

    Raises:
        OSError: its folder cannot be read.
    """
    ours = section.model_dump(mode="json", include=_JUDGED_BY)
    if section.model is not None and Path(section.model).is_dir():
        files = [path for path in Path(section.model).iterdir() if path.is_file()]
        ours["files"] = sorted((path.name, path.stat().st_size) for path in files)
        ours["config"] = (Path(section.model) / "config.json").read_text(encoding="utf-8")
    return f"{_VERSION}-{hashlib.sha256(json.dumps(ours, sort_keys=True).encode()).hexdigest()[:12]}"


def prompt_messages(item: RewardItem) -> list[dict[str, Any]]:
    """The messages of an item's prompt; empty where they are not known."""
    given = item.extra_info.get("prompt_messages")
    if isinstance(given, list) and all(isinstance(each, dict) for each in given):
        return given
    if item.messages and item.messages[-1].get("role") == "assistant":
        return [dict(each) for each in item.messages[:-1]]
    return []
