"""Published datasets become rows that a run takes: each in the forms in which it is published."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rollmesh.data.prepare import Written, prepare
from rollmesh.data.recipes import RECIPES, Recipe, recipe_named
from rollmesh.learner.data.dataset import open_source
from rollmesh.learner.data.rows import Row
from rollmesh.mesh.config.inputs import DataSource
from rollmesh.mesh.errors import DataError
from rollmesh.reward_service.outcomes import RewardItem, Scored
from rollmesh.reward_service.scorers import auto

GSM8K = {"question": "Two and 1,998?", "answer": "It is <<2+1998=2000>>2000.\n#### 2,000"}
MATH = {
    "problem": "What is $1/2$ of 3?",
    "level": "Level 1",
    "type": "Prealgebra",
    "solution": r"First \boxed{1}, then \boxed{\frac{3}{2}}.",
}
MATH_500 = {"problem": "Two?", "solution": r"\boxed{2}", "answer": "2", "subject": "Algebra", "level": 1}
DAPO_HEAD = RECIPES["dapo_math"].preamble
DAPO_TAIL = RECIPES["dapo_math"].instruction
DAPO = {
    "data_source": "math_dapo",
    "prompt": [{"role": "user", "content": f"{DAPO_HEAD}\n\nHow many?\n\n{DAPO_TAIL}"}],
    "ability": "MATH",
    "reward_model": {"ground_truth": "34", "style": "rule-lighteval/MATH_v2"},
    "extra_info": {"index": "9a9b6eb4"},
}
AIME_2024 = {"ID": "2024-I-1", "Problem": "Every morning?", "Solution": "...", "Answer": 204}
AIME_2025 = {"problem": "Find the sum.", "answer": "070", "id": "0"}
GEO3K = {"images": [{"bytes": b"\x89PNG", "path": None}], "problem": "<image>Find x.", "answer": "3"}
COUNTDOWN = {"nums": [4, 5, 6], "target": 26}


def write(path: Path, records: Sequence[dict[str, Any]]) -> DataSource:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(list(records)), path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(records if len(records) > 1 else records[0], indent=4))
    else:
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return DataSource(path=str(path))


def rows(written: Written) -> list[Row]:
    source = open_source(DataSource(path=str(written.path)))
    return source.rows(range(len(source)))


@pytest.mark.parametrize(
    ("name", "record", "suffix", "question", "answer"),
    [
        ("gsm8k", GSM8K, "jsonl", "Two and 1,998?", "2000"),
        ("gsm8k", GSM8K, "parquet", "Two and 1,998?", "2000"),
        ("math", MATH, "jsonl", "What is $1/2$ of 3?", r"\frac{3}{2}"),
        ("math", MATH, "json", "What is $1/2$ of 3?", r"\frac{3}{2}"),
        ("math", MATH_500, "jsonl", "Two?", "2"),
        ("dapo_math", DAPO, "parquet", "How many?", "34"),
        ("aime", AIME_2024, "parquet", "Every morning?", "204"),
        ("aime", AIME_2025, "jsonl", "Find the sum.", "70"),
        ("aime", DAPO, "parquet", "How many?", "34"),
        ("countdown", COUNTDOWN, "jsonl", "the numbers [4, 5, 6]", '{"numbers": [4, 5, 6], "target": 26}'),
    ],
)
def test_published_forms_become_rows(
    tmp_path: Path, name: str, record: dict[str, Any], suffix: str, question: str, answer: str
) -> None:
    recipe = recipe_named(name)
    [written] = prepare(recipe, [write(tmp_path / f"d.{suffix}", [record])], [], tmp_path / "out")
    [row] = rows(written)
    [message] = row.prompt
    assert isinstance(message, dict)
    assert question in message["content"]
    assert message["content"].endswith(recipe.instruction)
    assert message["content"].startswith(recipe.preamble)
    assert message["content"].count(recipe.instruction) == 1
    assert (row.data_source, row.ground_truth) == (recipe.data_source, answer)
    assert row.extra_info["split"] == "train"


@pytest.mark.parametrize(
    ("name", "record", "response"),
    [
        ("gsm8k", GSM8K, "So it is 2000.\n#### 2000"),
        ("math", MATH, r"It is \boxed{\frac{3}{2}}."),
        ("dapo_math", DAPO, "Answer: 34"),
        ("aime", AIME_2025, "Answer: 70"),
    ],
)
def test_the_right_answer_as_instructed_is_scored_by_its_source_alone(
    tmp_path: Path, name: str, record: dict[str, Any], response: str
) -> None:
    [written] = prepare(recipe_named(name), [write(tmp_path / "d.parquet", [record])], [], tmp_path)
    [row] = rows(written)
    item = RewardItem(
        item_id="1",
        group_id="1",
        data_source=row.data_source,
        prompt="",
        response=response,
        ground_truth=row.ground_truth,
        extra_info=row.extra_info,
    )
    outcome = auto.score(item)
    assert isinstance(outcome, Scored)
    assert outcome.total == 1.0


def test_images_stay_with_their_problem(tmp_path: Path) -> None:
    [written] = prepare(recipe_named("geo3k"), [write(tmp_path / "d.parquet", [GEO3K])], [], tmp_path)
    [row] = rows(written)
    assert row.images == (b"\x89PNG",)
    assert "math" in recipe_named("geo3k").reward, "auto does not know the source"


def test_fields_that_only_later_records_have_are_kept(tmp_path: Path) -> None:
    """As of MATH-500 after Hendrycks' files."""
    first = [{**MATH, "problem": f"Problem {number}"} for number in range(1001)]
    sources = [write(tmp_path / "hendrycks.jsonl", first), write(tmp_path / "math500.jsonl", [MATH_500])]
    [written] = prepare(recipe_named("math"), sources, [], tmp_path / "out")
    found = rows(written)
    assert (found[0].extra_info["type"], "subject" in found[0].extra_info) == ("Prealgebra", False)
    assert ("type" in found[-1].extra_info, found[-1].extra_info["subject"]) == (False, "Algebra")


def test_folders_with_a_file_per_problem_are_read(tmp_path: Path) -> None:
    for number, topic in enumerate(("algebra", "geometry")):
        write(tmp_path / "MATH" / topic / "1.json", [{**MATH, "problem": f"Problem {number}"}])
    [written] = prepare(recipe_named("math"), [DataSource(path=str(tmp_path / "MATH"))], [], tmp_path / "out")
    assert written.rows == 2


def gsm8k(count: int) -> list[dict[str, Any]]:
    return [{"question": f"What is {n} + {n}?", "answer": f"#### {2 * n}"} for n in range(count)]


def of(name: str) -> Recipe:
    return recipe_named(name)


def test_a_problem_comes_once_and_is_not_both_trained_on_and_held_out(tmp_path: Path) -> None:
    otherwise = {"question": "What is 1 + 1?", "answer": "#### 3"}
    train = write(tmp_path / "train.jsonl", [*gsm8k(5), gsm8k(1)[0], otherwise])
    test = write(tmp_path / "test.jsonl", [{"question": "what is  4 + 4", "answer": "#### 8"}])
    training, held_out = prepare(of("gsm8k"), [train], [test], tmp_path / "out")
    assert (training.rows, held_out.rows) == (4, 1)
    assert training.left_out == {"is there already": 1, "is there already, with another answer": 1, "is held out": 1}
    assert training.examples["is held out"] == f"{tmp_path / 'train.jsonl'}, row 4"


def test_what_is_held_out_does_not_depend_on_the_order(tmp_path: Path) -> None:
    found = []
    for name, records in (("a", gsm8k(40)), ("b", gsm8k(40)[::-1])):
        source = write(tmp_path / f"{name}.jsonl", records)
        training, held_out = prepare(of("gsm8k"), [source], [], tmp_path / name, hold_out=8)
        assert (training.rows, held_out.rows) == (32, 8)
        found.append({row.ground_truth for row in rows(held_out)})
        assert not found[-1] & {row.ground_truth for row in rows(training)}
    assert found[0] == found[1]


def test_the_same_files_give_the_same_bytes(tmp_path: Path) -> None:
    source = write(tmp_path / "a.jsonl", gsm8k(10))
    contents = [prepare(of("gsm8k"), [source], [], tmp_path / name)[0].path.read_bytes() for name in "ab"]
    assert contents[0] == contents[1]


def test_many_rows_are_written_in_small_groups(tmp_path: Path) -> None:
    seen: list[int] = []
    source = write(tmp_path / "a.jsonl", gsm8k(2500))
    [written] = prepare(of("gsm8k"), [source], [], tmp_path, report=lambda _file, rows: seen.append(rows))
    assert seen == [1000, 2000, 2500]
    assert pq.read_metadata(written.path).num_row_groups == 3


@pytest.mark.parametrize(
    ("name", "record", "words"),
    [
        ("gsm8k", {"question": "a", "answer": "42"}, "1 x the answer has no ####"),
        ("gsm8k", {"problem": "a", "answer": "#### 4"}, "1 x no field `question`"),
        ("math", {"problem": "a", "solution": "2"}, r"no \\boxed"),
        ("dapo_math", {**DAPO, "prompt": "text"}, "not verl's form"),
        ("geo3k", {**GEO3K, "images": []}, "no list of images"),
        ("countdown", {"nums": ["x"], "target": 2}, "is no number"),
    ],
)
def test_files_of_another_form_are_refused_with_the_form_that_is_needed(
    tmp_path: Path, name: str, record: dict[str, Any], words: str
) -> None:
    with pytest.raises(DataError, match=words) as refused:
        prepare(of(name), [write(tmp_path / "d.parquet", [record])], [], tmp_path / "out")
    assert of(name).published in refused.value.hint
    assert list((tmp_path / "out").iterdir()) == [], "nothing half written stays"


def test_an_unknown_dataset_names_those_that_are_known() -> None:
    with pytest.raises(DataError, match="'gsm9k'") as refused:
        recipe_named("gsm9k")
    assert "gsm8k, math" in refused.value.hint
