"""One row of prompts: checked, and the same whatever file and form it comes from.

Two forms, which the first row of a file decides:

* verl's: `prompt` (a string or a list of chat messages), `data_source`, `reward_model` with `ground_truth`;
  `extra_info`, `images` and `ability` may be missing;
* TRL's: `prompt`, and any other columns, all of which the reward gets. There is no `reward_model`. One column may be
  the ground truth.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollmesh.learner.data.images import MARK, ImageSource, image_source, split_images
from rollmesh.learner.data.parts.json_texts import structure
from rollmesh.learner.data.parts.messages import text_or_messages
from rollmesh.learner.data.parts.shown_tools import TOOL_FIELDS, schemas_of, shown_tools
from rollmesh.learner.data.parts.template_arguments import FIELDS, read_template_arguments
from rollmesh.learner.data.parts.turn_flags import without_flags
from rollmesh.learner.data.records import Record
from rollmesh.learner.data.row_fields import SYSTEM_FIELDS, system_field, with_system
from rollmesh.mesh.config.inputs import SourceSampling
from rollmesh.mesh.errors import DataError

_FORM_HINT = (
    "rows need `prompt`, `data_source` and `reward_model: {style, ground_truth}` (verl's form), or `prompt` and "
    "columns for the reward (TRL's); `data.prompt_key` renames the first"
)
# Columns that hold the ground truth in TRL's form unless another one is named; the first one counts.
_TRUTHS = ("ground_truth", "answer", "solution")
_VERL_FIELDS = ("data_source", "reward_model", "extra_info", "images", *FIELDS, *TOOL_FIELDS)


@dataclass(frozen=True, slots=True)
class PromptForm:
    """The names of a source's fields, and what its rows have in common; see `records.RowForm`.

    Attributes:
        prompt_key: field with the prompt.
        ground_truth_key: field with the ground truth in TRL's form; None: the first of the usual ones, if any.
        name: `data_source` of rows that have none; None: rows of verl's form need one.
        label: the same for rows of TRL's form where there is no name.
        template_kwargs: further arguments of the chat template.
        sampling: of responses, where the source has settings of its own.
        confined: images are files of the dataset's own: it is a stranger's, and may name none elsewhere.
    """

    prompt_key: str = "prompt"
    ground_truth_key: str | None = None
    name: str | None = None
    label: str = "data"
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    sampling: SourceSampling = field(default_factory=SourceSampling)
    confined: bool = False

    def has_columns(self, names: Collection[str]) -> bool:
        """True where a row with these fields has TRL's form."""
        truth = self.ground_truth_key is not None or any(name in names for name in _TRUTHS)
        return "reward_model" not in names and (truth or "data_source" not in names)

    def columns(self, names: Collection[str]) -> list[str]:
        if self.has_columns(names):
            return list(names)
        return [name for name in dict.fromkeys((self.prompt_key, *_VERL_FIELDS, *SYSTEM_FIELDS)) if name in names]

    def check(self, path: Path, index: int, record: Record, names: Collection[str]) -> None:
        self.parse(path, index, record, names)

    def parse(self, path: Path, index: int, record: Record, names: Collection[str]) -> Row:
        """See `records.RowForm`; `names` say whether the file has TRL's form."""
        origin = f"{path}, row {index}"
        try:
            return self._parse(path.parent, origin, record, names)
        except DataError as error:
            raise DataError(f"{origin}: {error.message}", hint=error.hint) from error

    def _parse(self, folder: Path, origin: str, record: Record, names: Collection[str]) -> Row:
        key = self.prompt_key
        for name in self._required(names):
            if record.get(name) is None:
                raise _missing(name)
        prompt = text_or_messages(record[key], key)
        arguments = read_template_arguments(record)
        if isinstance(prompt, str):
            tools = schemas_of(record)
            if any(arguments.values()):
                raise DataError(
                    f"its prompt is a text, and `{' and '.join(arguments)}` is for a chat template",
                    hint=f"write the prompt as messages, or leave {' and '.join(arguments)} out",
                )
            if (system := system_field(record)) is not None:
                raise DataError(
                    f"its prompt is a text, and `{system}` is for a conversation",
                    hint=f"write the prompt as messages, or leave {system} out",
                )
        else:
            read, tools = shown_tools(schemas_of(record), with_system(without_flags(prompt), record))
            prompt = [dict(message) for message in read]
        given = record.get("images")
        if isinstance(given, str) and given.lstrip().startswith("["):
            given = structure(given, "images")
        if not isinstance(given, list | None):
            raise DataError(f"field `images` is {type(given).__name__}, expected a list")
        if self.has_columns(names):
            data_source, ground_truth, extra_info = _column_parts(record, prompt, self)
        else:
            data_source, ground_truth, extra_info = _verl_parts(record, self)
        if tools and not schemas_of(record):
            # A program or a reward finds tools of messages where it finds the row's.
            extra_info = {**extra_info, "tools": tools}
        images: tuple[ImageSource, ...] = ()
        if given or not (isinstance(prompt, str) or _is_plain(prompt)):
            try:
                prompt, images = _with_images(prompt, given or [], folder, confined=self.confined)
            except ValueError as error:
                raise DataError(f"field `{'images' if given else key}` {error}") from error
        arguments = {**self.template_kwargs, **arguments}
        return Row(prompt, data_source, ground_truth, extra_info, images, arguments, self.sampling, origin, tools)

    def _required(self, names: Collection[str]) -> list[str]:
        if self.has_columns(names):
            return [self.prompt_key, *([self.ground_truth_key] if self.ground_truth_key else [])]
        return [self.prompt_key, *([] if self.name else ["data_source"]), "reward_model"]


@dataclass(frozen=True, slots=True)
class Row:
    """One dataset row, with the parts a reward needs as they came from the file.

    Attributes:
        prompt: a string or chat messages; of a row with images the contents of messages are lists of parts.
        data_source, ground_truth, extra_info: for the reward.
        images: those of the prompt, in the order of their marks.
        template_kwargs: further arguments of the chat template.
        sampling: of responses, where its source has settings of its own.
        origin: its file, and its number there.
        tools: schemas that the prompt shows.
    """

    prompt: str | list[dict[str, Any]]
    data_source: str
    ground_truth: Any
    extra_info: Mapping[str, Any]
    images: tuple[ImageSource, ...] = ()
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    sampling: SourceSampling = field(default_factory=SourceSampling)
    origin: str = "a row"
    tools: Sequence[Mapping[str, Any]] = ()


def _missing(field: str) -> DataError:
    return DataError(f"field `{field}` is missing", hint=_FORM_HINT)


def _is_plain(messages: Sequence[Mapping[str, Any]]) -> bool:
    """True for messages without parts; one with calls alone has no content."""
    return not any(isinstance(message["content"], list) for message in messages)


def _verl_parts(record: Mapping[str, Any], form: PromptForm) -> tuple[str, Any, Mapping[str, Any]]:
    data_source = record.get("data_source")
    if not isinstance(data_source, str | None):
        raise DataError("field `data_source` is not a string")
    reward_model = structure(record["reward_model"], "reward_model")
    if not isinstance(reward_model, Mapping):
        raise DataError("field `reward_model` is not an object", hint=_FORM_HINT)
    if reward_model.get("ground_truth") is None:
        raise _missing("reward_model.ground_truth")
    extra_info = structure(record.get("extra_info"), "extra_info")
    if not isinstance(extra_info, Mapping | None):
        raise DataError("field `extra_info` is not an object")
    return data_source or form.name or "", reward_model["ground_truth"], extra_info or {}


def _column_parts(
    record: Mapping[str, Any], prompt: str | list[dict[str, Any]], form: PromptForm
) -> tuple[str, Any, Mapping[str, Any]]:
    """TRL passes every column but the prompt to the reward; chat messages of the prompt are passed as they are read."""
    columns = {name: value for name, value in record.items() if name not in (form.prompt_key, "images")}
    inner = columns.get("extra_info")
    if isinstance(inner, str) and inner.lstrip().startswith("{"):
        inner = structure(inner, "extra_info")
    if isinstance(inner, Mapping):
        del columns["extra_info"]
        columns = {**inner, **columns}
    if isinstance(prompt, list) and _is_plain(prompt):
        columns["prompt_messages"] = prompt
    truth = form.ground_truth_key or next((name for name in _TRUTHS if name in record), "")
    data_source = columns.get("data_source")
    return data_source if isinstance(data_source, str) else form.name or form.label, record.get(truth), columns


def _with_images(
    prompt: str | list[dict[str, Any]], given: Sequence[Any], folder: Path, *, confined: bool
) -> tuple[str | list[dict[str, Any]], tuple[ImageSource, ...]]:
    """A prompt with marked images, and the images in the order of their marks.

    Raises:
        ValueError: marks and images do not fit each other, or one has no known form.
    """
    brought: list[Any]
    if isinstance(prompt, str):
        brought = [None] * prompt.count(MARK)
    else:
        prompt, brought = split_images(prompt)
    places = sum(value is None for value in brought)
    if places != len(given):
        raise ValueError(f"has {len(given)} images for {places} marks ({MARK}, or parts of type image)")
    others = iter(given)
    values = (next(others) if value is None else value for value in brought)
    return prompt, tuple(image_source(value, folder, confined=confined) for value in values)
