"""The identity of a run: the configuration, model and data with which its learner has last taken it over.

Invariants: an attempt that ends before its learner has taken the run over leaves the record as it was. A run continues
with the model and the data of its record, or is refused, unless a change is allowed by name. A model or a file is known
by its content, so that it may move. Other rewards, another agent and other held-out data are reported, edited files
too; the modules that these import are not known. Checkpoints bind a run to the architecture of their weights, whatever
is allowed. Nothing heavy is imported here.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import xxhash
from pydantic import TypeAdapter
from typing_extensions import TypedDict

from rollmesh.learner.checkpoint.names import CHECKPOINTS_NAME, newest_version
from rollmesh.learner.data.locations import data_files
from rollmesh.learner.model_files.checks import architecture, read_model_config
from rollmesh.learner.recovery.consumption_log import LOG_NAME
from rollmesh.mesh.config import Config, save_config
from rollmesh.mesh.config.inputs import DataSection, DataSource
from rollmesh.mesh.config.reward import RewardSection
from rollmesh.mesh.config.rollout import AgentSection
from rollmesh.mesh.errors import ConfigError, DataError
from rollmesh.mesh.files import write_atomically

CONFIG = "config.yaml"
"""The configuration with which the run was last taken over."""
LEARNER_JSON = "learner.json"
"""The summary of the last learner that ended in order."""
INPUTS = "inputs.json"
_MODEL_FILES = (
    *("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"),
    *("vocab.*", "merges.txt", "*.model", "*.safetensors", "*.bin"),
)
# Inputs that must not change. A change of all other recorded inputs is reported.
_OF = ("model.path", "data.train", "data.prompt_key")
_ARCHITECTURE = "model.architecture"
# Settings of a source that decide which row comes when, and what of it is the prompt.
_ORDERING = {"weight", "rows", "prompt_key"}
# Larger files are known by samples of them: a fine-tuned model differs everywhere.
_WHOLE_BYTES = 256 << 20
_SAMPLES, _SAMPLE_BYTES = 256, 16 << 10
_PIECE_BYTES = 1 << 20
_UNREADABLE_HINT = "remove it to continue without the check"


class RunInput(TypedDict):
    """An input of a run: its name in the configuration, and a fingerprint, empty where it is not known."""

    name: str
    content: str


Inputs = dict[str, RunInput]
"""Inputs by key of the configuration, or by path of a file."""
_INPUTS = TypeAdapter(Inputs)


class RunRecord:
    """The record of one run.

    Args:
        config: of the present attempt, as the user gave it.
        model: the model's folder; None where it is not on this machine (yet).
    """

    def __init__(self, config: Config, model: Path | None) -> None:
        self._config = config
        self._folder = config.run.folder
        self._inputs = _inputs(config, model)

    def check(self, *, allow_changes: bool) -> None:
        """Refuses to continue a run of another model or of other data.

        Args:
            allow_changes: continue it all the same, where its checkpoints can be loaded.

        Raises:
            ConfigError: it would.
            DataError: the record cannot be read.
        """
        changed = self._changed_inputs()
        self._check_architecture(dict(changed))
        differences = []
        for key, former in changed if not allow_changes else ():
            if key in _OF:
                now = self._inputs[key]["name"]
                differences.append(f"{key} was {former}, now it is {now}{' with another content' * (now == former)}")
        if not differences:
            return
        named = "name" in self._config.run.model_fields_set
        shared = "" if named else "run.name is not set, so all such runs share one folder: "
        raise ConfigError(
            f"run {self._folder} was begun with something else: {'; '.join(differences)}",
            hint=f"{shared}choose a --run.name of its own, start over with `rollmesh run ... --fresh`, or continue it "
            "all the same with --allow-changes",
        )

    def edited_files(self) -> list[str]:
        """Files of rewards, the agent, held-out data and other roles' models with changed content.

        Raises:
            DataError: the record cannot be read.
        """
        return [key for key, _ in self._changed_inputs() if key not in (*_OF, _ARCHITECTURE)]

    def inputs_differ(self) -> bool:
        """True where model or data differ from the record.

        Raises:
            DataError: the record cannot be read.
        """
        return any(key in _OF for key, _ in self._changed_inputs())

    def _check_architecture(self, changed: Mapping[str, str]) -> None:
        if _ARCHITECTURE in changed and newest_version(self._folder / CHECKPOINTS_NAME) is not None:
            raise ConfigError(
                f"the checkpoints of run {self._folder} are of another architecture ({changed[_ARCHITECTURE]}) than "
                f"model.path {self._inputs['model.path']['name']} ({self._inputs[_ARCHITECTURE]['name']})",
                hint="it cannot be continued with this model: choose a --run.name of its own, or start over with "
                "`rollmesh run ... --fresh`",
            )

    def _changed_inputs(self) -> list[tuple[str, str]]:
        """The inputs that differ now: key and former name."""
        path = self._folder / INPUTS
        return changed_inputs(_read(path) if path.exists() else {}, self._inputs)

    def write(self) -> None:
        """Replaces the record: the learner has taken the run over with these inputs.

        Raises:
            DataError: the disk refuses.
        """
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            save_config(self._config, self._folder / CONFIG)
            write_inputs(self._folder, self._inputs)
        except OSError as error:
            raise DataError(
                f"cannot write {self._folder / CONFIG}: {error.strerror or error}", hint="free space, or set run.dir"
            ) from error


def changed_inputs(before: Inputs, now: Inputs) -> list[tuple[str, str]]:
    """The inputs that differ, of those that were recorded: key and previous name."""
    return [(key, before[key]["name"]) for key, given in now.items() if key in before and not _same(before[key], given)]


def write_inputs(folder: Path, inputs: Inputs) -> None:
    """Replaces the inputs that are recorded in a run folder."""
    write_atomically(folder / INPUTS, json.dumps(inputs, indent=1) + "\n")


def read_inputs(folder: Path) -> Inputs:
    """The inputs that a training has recorded in its folder; none where there is no record.

    Raises:
        DataError: the record cannot be read.
    """
    path = folder / INPUTS
    return _parse(path) if path.exists() else {}


def file_inputs(files: Iterable[Path]) -> Inputs:
    """Files as inputs, under their own names: the configuration shows a change of the name."""
    return {str(path): {"name": str(path), "content": fingerprint([path])} for path in files}


def held_out_files(sources: Sequence[DataSource] | None) -> list[Path]:
    """The files of held-out data, as far as they are on this machine."""
    return [file for source in sources or () for file in files_here(source)]


def nothing_trained(folder: Path) -> bool:
    """True where no batch was ever used in a run folder, so that only initial weights depend on its data."""
    checkpoint, log = newest_version(folder / CHECKPOINTS_NAME), folder / LOG_NAME
    return (checkpoint is None or checkpoint.version == 0) and not (log.exists() and log.stat().st_size)


def reward_files(reward: RewardSection) -> list[Path]:
    """Files of the user's own reward functions and of a judge's template, as far as they are on this machine."""
    template = reward.judge.template if reward.asks_judge else None
    own = _files(reward.uses)
    return [*own, template] if template is not None and template.is_file() else own


def agent_files(agent: AgentSection) -> list[Path]:
    """Files that the agent's settings name, as far as they are on this machine; any word of a command may name one."""
    program = [spec for spec in (agent.environment, agent.program) if spec is not None]
    words = [path for word in agent.command if (path := Path(word)).suffix and path.is_file()]
    return [*_files([*agent.tools, *program]), *words]


def _files(specs: Sequence[str]) -> list[Path]:
    # `FILE:function`, or `scorer:FILE`. A pattern in its place may be too long for a path, which `Path` would raise.
    parts = [part for spec in specs for part in (spec.rpartition(":")[0], spec.partition(":")[2])]
    return [Path(part) for part in parts if os.path.isfile(part)]


def fingerprint(files: Sequence[Path]) -> str:
    """A digest of the files' contents, of large ones by samples; their names do not count.

    Raises:
        OSError: one cannot be read.
    """
    digest = xxhash.xxh3_128()
    for path in files:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            digest.update(size.to_bytes(8, "little"))
            if size <= _WHOLE_BYTES:
                while piece := file.read(_PIECE_BYTES):
                    digest.update(piece)
                continue
            for sample in range(_SAMPLES):
                file.seek(sample * (size - _SAMPLE_BYTES) // (_SAMPLES - 1))
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def _inputs(config: Config, model: Path | None) -> Inputs:
    revision = config.model.revision
    own = [*reward_files(config.reward), *agent_files(config.rollout.agent)]
    inputs = file_inputs([*own, *held_out_files(config.data.eval)])
    for role in config.learner.roles.values():
        if role.path and (folder := Path(role.path)).is_dir():
            inputs[role.path] = {"name": role.path, "content": fingerprint(model_files(folder))}
    weights = model_files(model) if model is not None else []
    if model is not None:
        inputs[_ARCHITECTURE] = {"name": architecture(read_model_config(model, "model.path")), "content": ""}
    return inputs | {
        "model.path": {
            "name": f"{config.model.path}@{revision}" if revision else config.model.path,
            "content": fingerprint(weights) if weights else "",
        },
        "data.train": {"name": _named(config.data), "content": rows_content(config.data.train, config.data.curriculum)},
        "data.prompt_key": {"name": config.data.prompt_key, "content": ""},
    }


def files_here(source: DataSource) -> list[Path]:
    """The files of a source as far as they are on this machine; a hub id's are those of the local cache."""
    try:
        return data_files(source, download=False)
    except DataError:
        return []


def _named(data: DataSection) -> str:
    """The training data in words: its sources, and the curriculum's function."""
    names = []
    for source in data.train:
        where = "/".join(part for part in (source.subset, source.split) if part)
        revision = f"@{source.revision}" if source.revision else ""
        names.append(f"{source.path}{revision}{f' ({where})' if where else ''}")
    return ", ".join(names) + (f" by {data.curriculum}" if data.curriculum else "")


def rows_content(sources: Sequence[DataSource], curriculum: str | None = None) -> str:
    """A digest of the files of all sources, and of what decides the order of their rows; empty where one is not here.

    One source without settings is known by its files alone.

    Args:
        sources: of rows.
        curriculum: the function that sets their weights.
    """
    files = [files_here(source) for source in sources]
    if not all(files):
        return ""
    settings = [source.model_dump(mode="json", include=_ORDERING, exclude_defaults=True) for source in sources]
    if len(files) == 1 and not settings[0]:
        return fingerprint(files[0])
    function = fingerprint(_files([curriculum])) if curriculum else ""
    parts = [[fingerprint(each), setting] for each, setting in zip(files, settings, strict=True)]
    return xxhash.xxh3_128_hexdigest(json.dumps([parts, function], sort_keys=True).encode())


def model_files(folder: Path) -> list[Path]:
    """The files by whose contents a model is known."""
    return sorted({path for pattern in _MODEL_FILES for path in folder.glob(pattern)})


def _same(before: RunInput, now: RunInput) -> bool:
    if before["content"] and now["content"]:
        return before["content"] == now["content"]
    return before["name"] == now["name"]


def _parse(path: Path) -> Inputs:
    try:
        return _INPUTS.validate_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {error}", hint=_UNREADABLE_HINT) from error


def _read(path: Path) -> Inputs:
    inputs = _parse(path)
    if missing := [key for key in _OF if key not in inputs]:
        raise DataError(f"{path} is damaged: it lacks {', '.join(missing)}", hint=_UNREADABLE_HINT)
    return inputs
