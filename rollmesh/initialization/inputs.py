"""The findings of `rollmesh init`: the model's folder, the first rows of the data, the devices of this machine."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollmesh.launcher.placement.visible import has_driver, visible_devices
from rollmesh.learner.data.dataset import open_rows
from rollmesh.learner.data.parts.messages import text_or_messages
from rollmesh.learner.data.prompts import PromptEncoder
from rollmesh.learner.data.records import Record
from rollmesh.learner.data.rows import Row
from rollmesh.learner.model_files.checks import declared_context, read_model_config, tensor_shapes
from rollmesh.mesh.config import load_config
from rollmesh.mesh.config.inputs import DataSource
from rollmesh.mesh.errors import DataError
from rollmesh.mesh.runtime.threads import available_cores
from rollmesh.mesh.tokenizer_files import load_tokenizer

# Rows that are looked at.
_ROWS = 200
# Names that datasets have for the prompt and for the ground truth, the most usual first.
_PROMPTS = ("prompt", "question", "problem", "query", "instruction", "input", "messages")
_TRUTHS = ("ground_truth", "answer", "solution", "target", "final_answer", "label", "output")


@dataclass(frozen=True, slots=True)
class ModelLook:
    """A model.

    Attributes:
        path: as given.
        context: tokens of its longest sequence; None: not known.
        parameters: number of them; None: not known.
        chats: it has a chat template; None: not known.
    """

    path: str
    context: int | None = None
    parameters: int | None = None
    chats: bool | None = None


@dataclass(frozen=True, slots=True)
class DataLook:
    """The first rows of the data.

    Attributes:
        path: as given.
        prompt_key: field with the prompt.
        truth_key: field with the ground truth of rows in TRL's form; None without one.
        verl: rows have verl's form.
        chats: prompts are chat messages.
        sources: `data_source` of the rows, in order of appearance.
        longest: tokens of the longest prompt of these rows; None: not measured.
        rows: how many there are in all.
    """

    path: str
    prompt_key: str
    truth_key: str | None
    verl: bool
    chats: bool
    sources: tuple[str, ...]
    longest: int | None
    rows: int


@dataclass(frozen=True, slots=True)
class MachineLook:
    """This machine.

    Attributes:
        cores: that this process may use.
        devices: CUDA devices that torch can use.
    """

    cores: int
    devices: int


def look_at_model(path: str) -> ModelLook:
    """Reads a model's folder; of a hub id nothing is fetched.

    Raises:
        DataError: the folder cannot be loaded.
    """
    folder = Path(path).expanduser()
    if not folder.is_dir():
        return ModelLook(path)
    # Loads torch.
    from rollmesh.learner.examination.folder import READ_S, examine

    examine(folder, "model.path", read_s=READ_S)
    config = read_model_config(folder, "model.path")
    return ModelLook(
        path,
        declared_context(config),
        sum(math.prod(shape) for shape in tensor_shapes(folder).values()) or None,
        load_tokenizer(folder).chat_template is not None,
    )


def look_at_data(path: str, model: ModelLook) -> DataLook:
    """Reads the first rows of a source.

    Args:
        path: file, folder, pattern or hub id.
        model: whose tokens are counted, where its folder is here.

    Raises:
        DataError: the source cannot be read; no field looks like a prompt; chat messages, and a model without a
            template for them.
    """
    source = open_rows(DataSource(path=path), _AnyRecord(), checked=False)
    records = list(source.rows(range(min(_ROWS, len(source)))))
    if not records:
        raise DataError(f"{path} has no rows", hint="give a file with rows")
    names = list(records[0])
    prompt_key = next((name for name in _PROMPTS if name in names), None)
    if prompt_key is None:
        raise DataError(
            f"{path}: no field looks like a prompt (there are: {', '.join(names)})",
            hint="rows need the prompt as a text or as chat messages; data.prompt_key names its field",
        )
    prompts = [_prompt(f"{path}, row {index}", record, prompt_key) for index, record in enumerate(records)]
    chats = not isinstance(prompts[0], str)
    if not isinstance(prompts[0], str) and prompts[0] and prompts[0][-1]["role"] == "assistant":
        raise DataError(
            f"{path}: field {prompt_key} ends with an answer, as rows of `rollmesh sft` do",
            hint="`rollmesh sft` trains such rows (docs/trainers.md); prompts of a run end before the answer",
        )
    if chats and model.chats is False:
        raise DataError(
            f"{path}: prompts are chat messages, and the tokenizer of {model.path} has no chat template",
            hint="take an instruction-tuned model, or make texts of the prompts",
        )
    verl = "reward_model" in names
    sources = dict.fromkeys(str(record["data_source"]) for record in records if record.get("data_source"))
    return DataLook(
        path,
        prompt_key,
        None if verl else next((name for name in _TRUTHS if name in names and name != prompt_key), None),
        verl,
        chats,
        tuple(sources),
        _longest(prompts, model),
        len(source),
    )


def look_at_machine() -> MachineLook:
    """Counts cores and devices; torch is only asked where NVIDIA's driver is installed."""
    devices = 0
    if has_driver():
        config = load_config({"model": {"path": "m"}, "data": {"train": "t"}})
        devices = min(visible_devices(config, os.environ).learner, visible_devices(config, os.environ).generators)
    return MachineLook(available_cores(), devices)


def _prompt(origin: str, record: Record, key: str) -> str | list[dict[str, Any]]:
    try:
        return text_or_messages(record[key], key)
    except DataError as error:
        raise DataError(f"{origin}: {error.message}", hint=error.hint) from error


def _longest(prompts: Iterable[str | list[dict[str, Any]]], model: ModelLook) -> int | None:
    """Tokens of the longest prompt; None if the tokenizer is not here."""
    folder = Path(model.path).expanduser()
    if not folder.is_dir():
        return None
    encoder = PromptEncoder(load_tokenizer(folder), max_prompt_tokens=0, template_kwargs={})
    return max(len(encoder.ids(Row(prompt, "", None, {}))) for prompt in prompts)


class _AnyRecord:
    """The form of rows that are taken as they are; see `records.RowForm`."""

    def columns(self, names: Collection[str]) -> list[str]:
        return list(names)

    def check(self, path: Path, index: int, record: Record, names: Collection[str]) -> None:
        """Takes every record."""

    def parse(self, path: Path, index: int, record: Record, names: Collection[str]) -> Record:  # noqa: ARG002
        return record
