"""Responses from files, as items for a reward: rows of a dataset, and samples that a run has kept."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from rollmesh.mesh.errors import DataError
from rollmesh.protos import reward_pb2

_MAX_ROWS = 16
_BATCH_ROWS = 256


@dataclass(frozen=True, slots=True)
class SampleRow:
    """One row of a file.

    Attributes:
        name: of the row, for a reader: `row 7`, or `step 3, group 1.2` of a run's samples.
        responses: all of them; empty where the row has none.
        members: the name of each response in its group.
        recorded: the reward that the file has for each; None: none.
        step: of a run's sample; None for others.
    """

    name: str
    data_source: str
    prompt: str
    ground_truth: Any
    extra_info: Mapping[str, Any] = field(default_factory=dict)
    responses: tuple[str, ...] = ()
    members: tuple[str, ...] = ()
    recorded: tuple[float | None, ...] = ()
    step: int | None = None

    def item(self, member: str, response: str) -> reward_pb2.ScoreItem:
        """A response to this row, as a reward gets it."""
        return item(
            f"{self.name}/{member}",
            response,
            json.dumps(self.ground_truth, default=str),
            group_id=self.name,
            data_source=self.data_source,
            prompt=self.prompt,
            extra_info_json=json.dumps(dict(self.extra_info), default=str),
        )

    def first(self, count: int) -> SampleRow:
        """The row with its first responses alone."""
        return replace(
            self, responses=self.responses[:count], members=self.members[:count], recorded=self.recorded[:count]
        )

    def items(self) -> list[reward_pb2.ScoreItem]:
        """Its responses, as a reward gets them."""
        return [self.item(member, response) for member, response in zip(self.members, self.responses, strict=True)]


# Columns with the ground truth in TRL's form, the first one counts; and those that are no column of the reward's.
_TRUTHS = ("ground_truth", "answer", "solution")
_OWN = ("prompt", "response", "responses", "reward", "score")


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
    """Groups of two for the first rows of a file, as `read_rows` reads it.

    The responses are the row's first one, where it has any, or its ground truth; and a wrong one.

    Raises:
        DataError: as `read_rows`, or a file without rows.
    """
    rows = list(islice(read_rows(path), _MAX_ROWS))
    if not rows:
        raise DataError(f"sample file {path} has no rows")
    return [
        row.item(str(member), response)
        for row in rows
        for member, response in enumerate((row.responses[0] if row.responses else _truth(row), "certainly not this"))
    ]


def read_rows(path: Path) -> Iterator[SampleRow]:
    """The rows of a JSONL or Parquet file, in verl's or TRL's form with `response` or `responses`; or a run's samples.

    A recorded reward is `reward` or `score`; of several responses, a list.

    Raises:
        DataError: a file that is missing or unreadable, or a row without the needed fields.
    """
    records = enumerate(_records(path))
    while True:
        try:
            number, record = next(records)
        except StopIteration:
            return
        except (OSError, ValueError, RecursionError) as error:
            raise DataError(f"sample file {path}: {error}", hint="give a .parquet or .jsonl file") from error
        try:
            yield sample_row(record, f"row {number}")
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(
                f"sample file {path}, row {number}: {_what_is_wrong(error)}",
                hint="rows need `response`, and the ground truth as data_source and reward_model.ground_truth (verl's "
                "form) or as ground_truth, answer or solution (TRL's); or they are samples of a run",
            ) from error


def sample_row(record: Mapping[str, Any], name: str) -> SampleRow:
    """A row from a record of a file.

    Raises:
        KeyError, TypeError, ValueError: it lacks a field, or has one of another type.
    """
    if not isinstance(record, Mapping):
        raise TypeError("it is no object")
    responses, recorded = _responses(record)
    if "group" in record and "step" in record:
        # Others of the same group stand in rows of their own.
        name = f"step {record['step']}, group {record['group']}"
        return SampleRow(
            name,
            str(record.get("data_source", "")),
            _text(record.get("prompt", "")),
            record.get("ground_truth"),
            {},
            responses,
            (str(record.get("member", 0)),),
            recorded,
            int(record["step"]),
        )
    parts = _verl_parts(record) if "reward_model" in record else _column_parts(record, needed=not responses)
    data_source, truth, extra_info = parts
    return SampleRow(
        name,
        data_source,
        _text(record.get("prompt", "")),
        truth,
        extra_info,
        responses,
        tuple(map(str, range(len(responses)))),
        recorded,
    )


def _verl_parts(record: Mapping[str, Any]) -> tuple[str, Any, Mapping[str, Any]]:
    return str(record["data_source"]), record["reward_model"]["ground_truth"], record.get("extra_info") or {}


def _column_parts(record: Mapping[str, Any], *, needed: bool) -> tuple[str, Any, Mapping[str, Any]]:
    """TRL's form: the reward gets every column but the prompt. Some rewards need no ground truth."""
    truth = next((name for name in _TRUTHS if name in record), "ground_truth")
    if needed and truth not in record:
        raise KeyError(truth)
    columns = {name: value for name, value in record.items() if name not in _OWN}
    return str(record.get("data_source") or "data"), record.get(truth), columns


def _responses(record: Mapping[str, Any]) -> tuple[tuple[str, ...], tuple[float | None, ...]]:
    given = record.get("responses")
    if given is None:
        given = [record["response"]] if record.get("response") is not None else []
    rewards = record.get("reward", record.get("score"))
    if not isinstance(rewards, list):
        rewards = [rewards] * len(given)
    if len(rewards) != len(given):
        raise ValueError(f"{len(rewards)} rewards for {len(given)} responses")
    return tuple(map(str, given)), tuple(None if reward is None else float(reward) for reward in rewards)


def _what_is_wrong(error: Exception) -> str:
    return f"no field {error}" if isinstance(error, KeyError) else str(error)


def _truth(row: SampleRow) -> str:
    return row.ground_truth if isinstance(row.ground_truth, str) else json.dumps(row.ground_truth, default=str)


def _records(path: Path) -> Iterator[Mapping[str, Any]]:
    if path.suffix == ".parquet":
        import pyarrow.parquet

        from rollmesh.mesh.rows.arrow_rows import rows_of

        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(_BATCH_ROWS):
                yield from rows_of(batch)
        return
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            if line.strip():
                yield json.loads(line)


def _text(prompt: Any) -> str:
    if isinstance(prompt, str):
        return prompt
    return "\n".join(str(message.get("content") or "") for message in prompt)
