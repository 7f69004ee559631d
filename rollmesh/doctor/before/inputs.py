"""The inputs of a run: models that are whole, data with the fields that are needed, a hub that can be asked."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from rollmesh.doctor.findings import Finding, note, ok, problem
from rollmesh.learner.data.dataset import check_first_rows
from rollmesh.learner.data.locations import data_files, is_hub_id
from rollmesh.learner.model_files.checks import (
    check_context,
    check_model_files,
    check_role_tokens,
    declared_context,
    read_model_config,
    refuse_classifier,
)
from rollmesh.mesh.config.models import Config
from rollmesh.mesh.errors import RollmeshError

MODEL, DATA, HUB = "model", "data", "hub"
_OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE")
_TRUE = ("1", "on", "yes", "true")


def check_models(config: Config) -> Iterator[Finding]:
    """Folders of models: their files are whole, and of one kind with the actor's."""
    actor = Path(config.model.path)
    for key, path in _models(config).items():
        if not Path(path).is_dir():
            continue
        try:
            check_model_files(Path(path), key, tokenizer=key == "model.path")
            if key == "model.path":
                refuse_classifier(Path(path), key)
                check_context(declared_context(read_model_config(actor, key)), config.rollout.context_tokens)
            elif actor.is_dir():
                check_role_tokens(actor, Path(path), key)
        except RollmeshError as error:
            yield problem(MODEL, error.message, error.hint)
        else:
            yield ok(MODEL, f"{key} {path} is whole")


def check_data(config: Config) -> Iterator[Finding]:
    """The first rows of each source."""
    for key, sources in (("data.train", config.data.train), ("data.eval", config.data.eval or ())):
        for source in sources:
            if is_hub_id(source.path):
                continue
            try:
                files = data_files(source)
                check_first_rows(source, config.data.prompt_key)
            except RollmeshError as error:
                yield problem(DATA, f"{key}: {error.message}", error.hint)
            else:
                yield ok(DATA, f"{key} {source.label}: {len(files)} file(s), the first rows are as they should be")


def check_hub(config: Config) -> Iterator[Finding]:
    """Models and data that come from the Hugging Face Hub, or from its cache."""
    wanted = {key: path for key, path in _models(config).items() if not Path(path).is_dir()}
    for key, sources in (("data.train", config.data.train), ("data.eval", config.data.eval or ())):
        wanted |= {f"{key} {source.label}": source.path for source in sources if is_hub_id(source.path)}
    yield from judge_hub(os.environ, wanted, {path for path in wanted.values() if is_cached(path)})


def is_cached(hub_id: str) -> bool:
    """True where the local cache has a version of a model or dataset."""
    from huggingface_hub.constants import HF_HUB_CACHE

    name = hub_id.replace("/", "--")
    return any(any(Path(HF_HUB_CACHE, f"{kind}--{name}", "snapshots").glob("*")) for kind in ("models", "datasets"))


def judge_hub(environment: Mapping[str, str], wanted: Mapping[str, str], cached: set[str]) -> Iterator[Finding]:
    """Says what cannot be had.

    Args:
        environment: variables of the services.
        wanted: hub ids by key.
        cached: those of them that are on this machine.
    """
    offline = next((name for name in _OFFLINE if environment.get(name, "").lower() in _TRUE), "")
    for key, hub_id in wanted.items():
        if hub_id in cached:
            yield ok(HUB, f"{key}: {hub_id} is in the local cache")
        elif offline:
            yield problem(
                HUB,
                f"{key}: {hub_id} is not in the local cache, and {offline} forbids to fetch it",
                f"`unset {offline}`, or copy the folder here and set {key} to it",
                variable=offline,
            )
        else:
            yield note(
                HUB,
                f"{key}: {hub_id} will be downloaded when the run starts",
                f"`hf download {hub_id}` before saves the wait; on machines without network set {key} to a folder",
            )
    if not wanted:
        yield ok(HUB, "nothing is fetched")


def _models(config: Config) -> dict[str, str]:
    """Models that this machine reads, by key."""
    roles = config.learner.roles.items()
    here = {f"learner.roles.{name}.path": role.path for name, role in roles if role.at != "elsewhere"}
    return {"model.path": config.model.path} | {key: path for key, path in here.items() if path}
