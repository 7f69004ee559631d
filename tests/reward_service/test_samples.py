"""Items with which a reward server is checked, from files."""

import json
from pathlib import Path

import pytest

from rollmesh.mesh.errors import DataError
from rollmesh.reward_service.samples import items_from_file


def test_samples_from_files(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    rows = [
        {
            "prompt": [{"role": "user", "content": "12+30="}],
            "data_source": "arithmetic",
            "reward_model": {"style": "rule", "ground_truth": "42"},
            "extra_info": {"index": n},
        }
        for n in range(3)
    ]
    parquet, jsonl = tmp_path / "rows.parquet", tmp_path / "rows.jsonl"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), parquet)
    jsonl.write_text("\n".join(map(json.dumps, rows)))
    for path in (parquet, jsonl):
        items = items_from_file(path)
        assert len(items) == 6
        assert (items[0].prompt, items[0].response, items[0].data_source) == ("12+30=", "42", "arithmetic")
        assert json.loads(items[2].extra_info_json) == {"index": 1}


@pytest.mark.parametrize("truth", ["ground_truth", "answer", "solution"])
def test_rows_of_columns_give_the_reward_all_but_the_prompt(tmp_path: Path, truth: str) -> None:
    """TRL's form."""
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "2+2?", "response": "4", "score": 1, truth: "4", "level": 3}))
    first, _ = items_from_file(path)
    assert (first.response, json.loads(first.ground_truth_json), first.data_source) == ("4", "4", "data")
    assert json.loads(first.extra_info_json) == {truth: "4", "level": 3}
    path.write_text(json.dumps({"response": "4"}))
    assert items_from_file(path)[0].ground_truth_json == "null", "some rewards need none"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no rows"),
        ("{", "sample file"),
        ('{"prompt": "x", "data_source": "y"}', "row 0: no field 'ground_truth'"),
        ('{"prompt": "x", "reward_model": {"ground_truth": "y"}}', "row 0: no field 'data_source'"),
    ],
)
def test_sample_files_that_cannot_be_used(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(text)
    with pytest.raises(DataError, match=words):
        items_from_file(path)


def test_a_sample_file_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nothing\.jsonl"):
        items_from_file(tmp_path / "nothing.jsonl")
