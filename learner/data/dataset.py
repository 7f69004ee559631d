"""Dataset files with verl's fields, checked when they are opened and read row by row afterwards.

Fields of a row: `prompt` (a string or a list of chat messages), `data_source`, `reward_model` with `ground_truth`;
`extra_info`, `images` and `ability` may be missing. Invariant: a dataset that was opened has no row without a needed
field, so that a run does not stop hours later at row 40,000. Nothing is tokenised here and a JSONL file is not held in
memory.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from learner.data.images import MARK, ImageSource, image_source, parted
from mesh.errors import DataError

_JSON_LINES = (".jsonl", ".json", ".ndjson")
# Rows that are looked at in a moment.
_LOOKED_AT = 1000
_FORM_HINT = (
    "rows need `prompt`, `data_source` and `reward_model: {style, ground_truth}`; `data.prompt_key` renames the first"
)


@dataclass(frozen=True, slots=True)
class Row:
    """One dataset row, with the parts a reward needs as they came from the file.

    Attributes:
        index: in the file.
        prompt: a string or chat messages; of a row with images the contents of messages are lists of parts.
        data_source, ground_truth, extra_info: for the reward.
        images: those of the prompt, in the order of their marks.
    """

    index: int
    prompt: str | list[dict[str, Any]]
    data_source: str
    ground_truth: Any
    extra_info: Mapping[str, Any]
    images: tuple[ImageSource, ...] = ()


class RowSource(Protocol):
    """Random access to the rows of a file."""

    def __len__(self) -> int: ...

    def rows(self, indices: Sequence[int]) -> list[Row]:
        """The rows at `indices`, in that order."""
        ...


def open_dataset(path: Path, prompt_key: str = "prompt") -> RowSource:
    """Opens and checks a dataset.

    Args:
        path: a `.parquet`, `.jsonl` or `.json` (one object per line) file.
        prompt_key: field that holds the prompt.

    Raises:
        DataError: missing or unreadable file, no rows, or a row without a needed field (row and field named).
    """
    if not path.is_file():
        raise DataError(f"dataset {path} does not exist", hint="set data.train / data.eval to a Parquet or JSONL file")
    suffix = path.suffix.lower()
    source: RowSource
    if suffix == ".parquet":
        from learner.data.parquet import ParquetRows

        source = ParquetRows(path, prompt_key)
    elif suffix in _JSON_LINES:
        source = JsonlRows(path, prompt_key)
    else:
        raise DataError(f"dataset {path} has an unknown form", hint="use a .parquet or .jsonl file")
    if len(source) == 0:
        raise DataError(f"dataset {path} has no rows")
    return source


def check_beginning(path: Path, prompt_key: str = "prompt") -> None:
    """Refuses a dataset for what its first rows show in a moment; `open_dataset` looks at all of them.

    Raises:
        DataError: as `open_dataset`.
    """
    if path.suffix.lower() not in _JSON_LINES or not path.is_file():
        # A Parquet file holds its columns apart, so that looking at all rows takes no longer.
        open_dataset(path, prompt_key)
        return
    with path.open("rb") as file:
        lines = (line for line in file if line.strip())
        found = [_json_row(path, index, line, prompt_key) for index, line in enumerate(islice(lines, _LOOKED_AT))]
    if not found:
        raise DataError(f"dataset {path} has no rows")


def parse_row(path: Path, index: int, record: Mapping[str, Any], prompt_key: str) -> Row:
    """Checks one record.

    Raises:
        DataError: naming row and field.
    """

    def missing(field: str, found: str = "is missing") -> DataError:
        return DataError(f"{path}, row {index}: field `{field}` {found}", hint=_FORM_HINT)

    prompt = record.get(prompt_key)
    if prompt is None:
        raise missing(prompt_key)
    if isinstance(prompt, str):
        pass
    elif isinstance(prompt, list) and all(isinstance(message, dict) for message in prompt):
        for position, message in enumerate(prompt):
            for key in ("role", "content"):
                value = message.get(key)
                if not isinstance(value, str) and not (key == "content" and isinstance(value, list)):
                    raise missing(f"{prompt_key}[{position}].{key}", "is not a string")
    else:
        raise missing(prompt_key, f"is {type(prompt).__name__}, expected a string or a list of chat messages")
    data_source = record.get("data_source")
    if not isinstance(data_source, str):
        raise missing("data_source", "is missing" if data_source is None else "is not a string")
    reward_model = record.get("reward_model")
    if not isinstance(reward_model, Mapping):
        raise missing("reward_model", "is missing" if reward_model is None else "is not an object")
    if reward_model.get("ground_truth") is None:
        raise missing("reward_model.ground_truth")
    extra_info = record.get("extra_info")
    if extra_info is None:
        extra_info = {}
    elif not isinstance(extra_info, Mapping):
        raise missing("extra_info", "is not an object")
    given = record.get("images")
    if not isinstance(given, list | None):
        raise missing("images", f"is {type(given).__name__}, expected a list")
    pictured = bool(given) or not (isinstance(prompt, str) or all(isinstance(m["content"], str) for m in prompt))
    images: tuple[ImageSource, ...] = ()
    if pictured:
        try:
            prompt, images = _with_images(prompt, given or [], path.parent)
        except ValueError as error:
            raise missing("images" if given else prompt_key, str(error)) from error
    return Row(index, prompt, data_source, reward_model["ground_truth"], extra_info, images)


def _with_images(
    prompt: str | list[dict[str, Any]], given: Sequence[Any], folder: Path
) -> tuple[str | list[dict[str, Any]], tuple[ImageSource, ...]]:
    """A prompt whose images are marked, and these in the order of their marks.

    Raises:
        ValueError: marks and images do not fit each other, or one has no known form.
    """
    brought: list[Any]
    if isinstance(prompt, str):
        brought = [None] * prompt.count(MARK)
    else:
        prompt, brought = parted(prompt)
    places = sum(value is None for value in brought)
    if places != len(given):
        raise ValueError(f"has {len(given)} images for {places} marks ({MARK}, or parts of type image)")
    others = iter(given)
    return prompt, tuple(image_source(next(others) if value is None else value, folder) for value in brought)


class JsonlRows:
    """One JSON object per line. Holds the offset of every line, reads the lines when they are asked for."""

    def __init__(self, path: Path, prompt_key: str) -> None:
        self._path = path
        self._prompt_key = prompt_key
        self._offsets = array("q")
        position = 0
        with path.open("rb") as file:
            for line in file:
                if line.strip():
                    self._parse(len(self._offsets), line)
                    self._offsets.append(position)
                position += len(line)

    def __len__(self) -> int:
        return len(self._offsets)

    def rows(self, indices: Sequence[int]) -> list[Row]:
        found = []
        with self._path.open("rb") as file:
            for index in indices:
                file.seek(self._offsets[index])
                found.append(self._parse(index, file.readline()))
        return found

    def _parse(self, index: int, line: bytes) -> Row:
        return _json_row(self._path, index, line, self._prompt_key)


def _json_row(path: Path, index: int, line: bytes, prompt_key: str) -> Row:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}, row {index}: not valid JSON: {error}") from error
    if not isinstance(record, dict):
        raise DataError(f"{path}, row {index}: expected an object, got {type(record).__name__}")
    # Only an escape can stand for half a character; looking at all text would cost as much as reading it.
    if b"\\ud" in line.lower():
        try:
            json.dumps(record, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise DataError(
                f"{path}, row {index}: holds half a surrogate pair, {error.object[error.start]!a}, which is no text",
                hint="write the data again, with errors='replace'",
            ) from error
    return parse_row(path, index, record, prompt_key)
