"""Items with which a reward server is checked: built-in ones, or rows of a dataset file."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from rollmesh.mesh.errors import DataError
from rollmesh.protos import reward_pb2

_MAX_ROWS = 16


def item(
    item_id: str,
    response: str,
    ground_truth_json: str,
    *,
    group_id: str = "check",
    data_source: str = "arithmetic",
    prompt: str = "12+30=",
    extra_info_json: str = "{}",
) -> reward_pb2.ScoreItem:
    """An item with the characters of its response as its tokens."""
    return reward_pb2.ScoreItem(
        item_id=item_id,
        group_id=group_id,
        data_source=data_source,
        prompt=prompt,
        response=response,
        ground_truth_json=ground_truth_json,
        extra_info_json=extra_info_json,
        response_ids=[min(ord(character), 0xFFFF) for character in response],
    )


def builtin_items() -> list[reward_pb2.ScoreItem]:
    """Two groups of arithmetic, with right and wrong responses."""
    return [
        item(
            f"{group}/{member}",
            str(left + right + (member % 2)),
            json.dumps(str(left + right)),
            group_id=group,
            prompt=f"{left}+{right}=",
        )
        for group, left, right in (("first", 12, 30), ("second", 7, 5))
        for member in range(4)
    ]


def items_from_file(path: Path) -> list[reward_pb2.ScoreItem]:
    """Groups of two for the first rows of a JSONL or Parquet file with verl's fields.

    The responses are the row's `response`, where it has one, or its ground truth; and a wrong one.

    Raises:
        DataError: a file that is missing or unreadable, or a row without the needed fields.
    """
    try:
        rows = list(islice(_rows(path), _MAX_ROWS))
    except (OSError, ValueError) as error:
        raise DataError(f"sample file {path}: {error}", hint="give a .parquet or .jsonl file") from error
    if not rows:
        raise DataError(f"sample file {path} has no rows")
    items = []
    for number, row in enumerate(rows):
        try:
            truth = row["reward_model"]["ground_truth"]
            source, prompt = str(row["data_source"]), _text(row["prompt"])
        except (KeyError, TypeError) as error:
            raise DataError(
                f"sample file {path}, row {number}: no field {error}",
                hint="rows need prompt, data_source and reward_model.ground_truth",
            ) from error
        good = str(row.get("response") or truth)
        items += [
            item(
                f"row{number}/{member}",
                response,
                json.dumps(truth, default=str),
                group_id=f"row{number}",
                data_source=source,
                prompt=prompt,
                extra_info_json=json.dumps(row.get("extra_info") or {}, default=str),
            )
            for member, response in enumerate((good, "certainly not this"))
        ]
    return items


def _rows(path: Path) -> Iterator[Mapping[str, Any]]:
    if path.suffix == ".parquet":
        import pyarrow.parquet

        table = pyarrow.parquet.read_table(path)
        yield from table.slice(0, _MAX_ROWS).to_pylist()
        return
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            if line.strip():
                yield json.loads(line)


def _text(prompt: Any) -> str:
    if isinstance(prompt, str):
        return prompt
    return "\n".join(str(message["content"]) for message in prompt)
