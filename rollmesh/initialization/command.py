"""The work of `rollmesh init`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from rollmesh.initialization.inputs import look_at_data, look_at_machine, look_at_model
from rollmesh.initialization.proposal import Setting, Wishes, propose
from rollmesh.initialization.translation import translate
from rollmesh.initialization.writing import to_yaml
from rollmesh.mesh.config import load_config
from rollmesh.mesh.config.load import read_values
from rollmesh.mesh.config.models import Config
from rollmesh.mesh.errors import ConfigError, DataError
from rollmesh.reward_service.scorers.auto import scorer_of

# Settings of a proposal that complete a translated configuration.
_KEPT = ("run.", "model.path", "data.", "reward.")


@dataclass(frozen=True, slots=True)
class Request:
    """The request of a user.

    Attributes:
        model: folder or hub id; None: as in the configuration that is translated.
        data: training rows, likewise.
        wishes: see `proposal.Wishes`.
        source: configuration of verl or TRL; None: the settings are proposed.
    """

    model: str | None
    data: str | None
    wishes: Wishes
    source: Path | None = None


def configuration(request: Request) -> tuple[str, int]:
    """The text of a configuration for a request; it is checked as `rollmesh run` checks one.

    Returns:
        The text, and the number of notes at its end on what was not taken over.

    Raises:
        ConfigError: model or data are missing, no reward fits, or what was translated contradicts itself.
        DataError: model or data cannot be read.
    """
    translated, notes = translate(read_values(request.source, {})) if request.source is not None else ([], [])
    known = {setting.key: setting for setting in translated}
    model = request.model or _text(known, "model.path")
    data = request.data or _text(known, "data.train")
    if model is None or data is None:
        missing = "--model" if model is None else "--data"
        raise ConfigError(f"{missing} is missing", hint="rollmesh init --model FOLDER --data FILE --out cfg.yaml")
    settings, rows = _proposed(model, data, request, required=request.source is None)
    if request.source is not None:
        said = {"model.path": request.model, "data.train": request.data, "data.eval": request.wishes.eval}
        theirs = [setting for setting in translated if not said.get(setting.key)]
        keys = {setting.key for setting in theirs}
        # Sizes and speeds are theirs alone: a proposal of ours would mix two recipes.
        settings = [one for one in settings if one.key not in keys and one.key.startswith(_KEPT)] + theirs
        settings += _steps({setting.key: setting.value for setting in settings}, rows)
    head = [f"Written by `rollmesh init`{f' from {request.source}' if request.source else ''}."]
    text = to_yaml(_in_sections(settings), head, notes)
    load_config(yaml.safe_load(text))
    return text, len(notes)


def write_new(path: Path, text: str) -> None:
    """Writes a file that is not there yet.

    Raises:
        ConfigError: it is there, or cannot be written.
    """
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:
        raise ConfigError(f"{path} is there already", hint="choose another --out, or remove it") from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from error


def _proposed(model: str, data: str, request: Request, *, required: bool) -> tuple[list[Setting], int | None]:
    """The proposal, and the number of rows.

    A configuration that is translated may be another machine's: then its inputs need not be here, and its reward is
    written down somewhere else.
    """
    plain = [Setting("run.name", request.wishes.name), Setting("model.path", model), Setting("data.train", data)]
    try:
        found = look_at_model(model)
        rows = look_at_data(data, found)
        machine = look_at_machine()
        settings = propose(found, rows, machine, request.wishes, lambda name: scorer_of(name) is not None)
    except (ConfigError, DataError):
        if required:
            raise
        return plain, None
    return settings, rows.rows


def _steps(values: Mapping[str, Any], rows: int | None) -> Iterator[Setting]:
    """Steps that go as far as the epochs: theirs alone end a run there, and here the default of the steps would."""
    epochs, groups = values.get("data.epochs"), values.get("learner.batch.groups")
    if rows and isinstance(epochs, int) and isinstance(groups, int) and "learner.steps" not in values:
        steps = math.ceil(rows * epochs / groups)
        yield Setting("learner.steps", steps, f"{epochs} passes over {rows} rows, {groups} a step.")


def _text(known: dict[str, Setting], key: str) -> str | None:
    """The value of a translated setting; the first of several."""
    value = known[key].value if key in known else None
    first = value[0] if isinstance(value, list) and value else value
    return first if isinstance(first, str) else None


def _in_sections(settings: Sequence[Setting]) -> list[Setting]:
    """The settings by section, in the order in which the documentation has them."""
    order = list(Config.model_fields)
    return sorted(settings, key=lambda setting: order.index(setting.key.partition(".")[0]))
