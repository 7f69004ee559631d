"""One row of a dataset, with verl's fields: checked, whatever file it comes from.

Fields: `prompt` (a string or a list of chat messages), `data_source`, `reward_model` with `ground_truth`; `extra_info`,
`images` and `ability` may be missing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rollmesh.learner.data.images import MARK, ImageSource, image_source, split_images
from rollmesh.mesh.errors import DataError

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
    return prompt, tuple(image_source(next(others) if value is None else value, folder) for value in brought)
