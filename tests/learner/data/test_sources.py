"""Where rows come from: folders and patterns of shards, saved datasets, the hub's cache, files larger than memory."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rollmesh.learner.data import tables
from rollmesh.learner.data.dataset import JoinedRows, check_first_rows, open_source
from rollmesh.learner.data.locations import data_files
from rollmesh.learner.data.order import DataOrder
from rollmesh.learner.data.rows import PromptForm
from rollmesh.learner.data.tables import ParquetPieces, TableRows
from rollmesh.mesh.config.inputs import DataSource
from rollmesh.mesh.errors import DataError
from tests.learner.data.conftest import open_file, record, write_jsonl


def write_parquet(path: Path, indices: range, group: int = 1 << 20) -> Path:
    pq.write_table(pa.Table.from_pylist([record(i) for i in indices]), path, row_group_size=group)
    return path


def save_to_disk(folder: Path, indices: range, shards: int = 1) -> None:
    """The files of `datasets.save_to_disk`: streams of record batches, and a list of them."""
    folder.mkdir(parents=True)
    names = [f"data-{shard:05d}-of-{shards:05d}.arrow" for shard in range(shards)]
    each = len(indices) // shards
    for shard, name in enumerate(names):
        table = pa.Table.from_pylist([record(i) for i in indices[shard * each : (shard + 1) * each]])
        with pa.ipc.new_stream(folder / name, table.schema) as stream:
            for batch in table.to_batches(max_chunksize=3):
                stream.write_batch(batch)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))


def cache_of_hub(folder: Path, repository: str, files: dict[str, bytes]) -> None:
    """The hub's local cache with one dataset, as `huggingface_hub` lays it out."""
    base = folder / f"datasets--{repository.replace('/', '--')}"
    (base / "refs").mkdir(parents=True)
    (base / "refs" / "main").write_text("0" * 40)
    for name, content in files.items():
        path = base / "snapshots" / ("0" * 40) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def prompts(source: Any) -> list[str]:
    return [row.prompt for row in source.rows(range(len(source)))]


@pytest.mark.parametrize("path", ["shards", "shards/*.parquet", "shards/p[0-9].parquet"])
def test_shards_are_joined_in_the_order_of_their_names(
    tmp_path: Path, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shards").mkdir()
    write_parquet(tmp_path / "shards" / "p1.parquet", range(4, 7))
    write_parquet(tmp_path / "shards" / "p0.parquet", range(4))
    source = open_source(DataSource(path=path))
    assert prompts(source) == [f"{i}+1=" for i in range(7)]
    last = source.rows([6, 0])[0]
    assert last.origin == "shards/p1.parquet, row 2"


@pytest.mark.parametrize("pattern", ["", "*.jsonl"])
@pytest.mark.parametrize("kind", ["loop", "gone", "pipe"])
def test_a_shard_that_is_no_file_is_named_and_not_left_out(tmp_path: Path, kind: str, pattern: str) -> None:
    write_jsonl(tmp_path / "a.jsonl", [record(0)])
    odd = tmp_path / "b.jsonl"
    if kind == "pipe":
        os.mkfifo(odd)
    else:
        odd.symlink_to(odd if kind == "loop" else tmp_path / "gone.jsonl")
    with pytest.raises(DataError, match=f"dataset {odd} is no regular file"):
        data_files(DataSource(path=str(tmp_path / pattern)))


def test_lines_of_several_files_are_numbered_through(tmp_path: Path) -> None:
    for name, rows in (("a", range(3)), ("b", range(3, 5))):
        write_jsonl(tmp_path / f"{name}.jsonl", [record(i) for i in rows])
    source = open_source(DataSource(path=str(tmp_path)))
    assert [row.prompt for row in source.rows([4, 1])] == ["4+1=", "1+1="]


def test_sources_are_numbered_through_too(tmp_path: Path) -> None:
    first = open_file(write_jsonl(tmp_path / "a.jsonl", [record(i) for i in range(3)]), rows=2)
    second = open_file(write_parquet(tmp_path / "b.parquet", range(3, 5)))
    joined = JoinedRows([first, second])
    assert len(joined) == 4
    assert [row.prompt for row in joined.rows([3, 0, 2])] == ["4+1=", "0+1=", "3+1="]
    assert joined.rows([2])[0].origin == f"{tmp_path / 'b.parquet'}, row 0", "errors name the file's own number"


@pytest.mark.parametrize("shards", [1, 2])
def test_a_saved_dataset_is_read_without_its_library(tmp_path: Path, shards: int) -> None:
    save_to_disk(tmp_path / "d", range(8), shards)
    source = open_file(tmp_path / "d")
    assert prompts(source) == [f"{i}+1=" for i in range(8)]
    assert source.rows([7])[0].extra_info == {"index": 7}
    assert source.blocks is None, "it is mapped into memory: every row is near"


def test_a_saved_dictionary_has_splits(tmp_path: Path) -> None:
    save_to_disk(tmp_path / "train", range(4))
    save_to_disk(tmp_path / "test", range(4, 6))
    (tmp_path / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "test"]}))
    assert len(open_file(tmp_path)) == 4
    assert prompts(open_file(tmp_path, split="test")) == ["4+1=", "5+1="]
    with pytest.raises(DataError, match="no split 'dev'; it has: train, test"):
        open_file(tmp_path, split="dev")
    (tmp_path / "train" / "data-00000-of-00001.arrow").unlink()
    with pytest.raises(DataError, match="is incomplete: it lacks data-00000"):
        open_file(tmp_path)


CARD = """---
configs:
- config_name: main
  data_files:
  - {split: train, path: main/train-*}
  - {split: test, path: main/test-*}
- config_name: socratic
  data_files: socratic/*.jsonl
---
# A card
"""


def test_a_hub_id_is_found_in_the_local_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = json.dumps(record(0)).encode() + b"\n"
    files = {
        "README.md": CARD.encode(),
        "main/train-00000.jsonl": line * 3,
        "main/test-00000.jsonl": line,
        "socratic/a.jsonl": line * 2,
    }
    cache_of_hub(tmp_path, "org/tasks", files)
    cache_of_hub(tmp_path, "org/plain", {"data/train-00000.jsonl": line, "data/test-00000.jsonl": line * 2})
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)

    def found(**settings: Any) -> list[str]:
        return [path.name for path in data_files(DataSource(**settings), download=False)]

    assert found(path="org/tasks", subset="main") == ["train-00000.jsonl"]
    assert found(path="org/tasks", subset="main", split="test") == ["test-00000.jsonl"]
    assert found(path="org/tasks", subset="socratic") == ["a.jsonl"]
    assert found(path="org/plain", split="test") == ["test-00000.jsonl"]
    for settings, words in [
        ({"path": "org/tasks"}, "several subsets: main, socratic"),
        ({"path": "org/tasks", "subset": "x"}, "no subset 'x'"),
        ({"path": "org/plain", "split": "dev"}, "no Parquet or JSONL files of 'dev'"),
        ({"path": "org/absent"}, "neither here nor available"),
    ]:
        with pytest.raises(DataError, match=words):
            found(**settings)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The hub's local cache, with a file next to it that no dataset may name."""
    cache = tmp_path / "cache"
    write_jsonl(tmp_path / "private.jsonl", [record(0)])
    (tmp_path / "private.png").write_bytes(b"png")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return cache


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"split": "train", "path": "../../../../private*"}, "outside of the dataset"),
        ({"split": "train", "path": ["a.jsonl", "x/../../../../../private.jsonl"]}, "outside of the dataset"),
        ({"split": "train", "path": "{parent}/private.jsonl"}, "outside of the dataset"),
        ({"split": "train", "path": ""}, "outside of the dataset"),
        ({"split": "train", "path": []}, "no split or no path"),
        ({"split": "train"}, "no split or no path"),
        ({"path": "a.jsonl"}, "no split or no path"),
        (["a.jsonl"], "no split or no path"),
    ],
)
def test_a_card_names_files_of_its_dataset_alone(hub: Path, entry: Any, words: str) -> None:
    files = json.loads(json.dumps([entry]).replace("{parent}", str(hub.parent)))
    card = json.dumps({"configs": ["odd", {"config_name": "default", "data_files": files}]})
    line = json.dumps(record(0)).encode() + b"\n"
    cache_of_hub(hub, "org/tasks", {"README.md": f"---\n{card}\n---\n".encode(), "a.jsonl": line})
    with pytest.raises(DataError, match=words):
        data_files(DataSource(path="org/tasks"), download=False)


@pytest.mark.parametrize("place", ["{parent}/private.png", "../../../../private.png", "a/../../x.png"])
def test_rows_of_the_hub_name_images_of_their_dataset_alone(hub: Path, place: str) -> None:
    def line(image: str) -> bytes:
        return json.dumps(record(0, prompt="<image>", images=[{"path": image}])).encode() + b"\n"

    cache_of_hub(hub, "org/own", {"train.jsonl": line("images/a.png")})
    [row] = open_source(DataSource(path="org/own")).rows([0])
    assert [source.name for source in row.images if isinstance(source, Path)] == ["a.png"]
    cache_of_hub(hub, "org/other", {"train.jsonl": line(place.replace("{parent}", str(hub.parent)))})
    with pytest.raises(DataError, match="lies outside of the dataset"):
        open_source(DataSource(path="org/other"))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"path": "absent.jsonl"}, "absent.jsonl does not exist"),
        ({"path": "*.none"}, "has no files"),
        ({"path": "."}, "Parquet and JSONL files"),
        ({"path": "a.jsonl", "split": "test"}, "neither splits nor subsets"),
        ({"path": "*.txt"}, "unknown form"),
    ],
)
def test_places_without_data_are_named(
    tmp_path: Path, settings: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_parquet(tmp_path / "a.parquet", range(2))
    write_jsonl(tmp_path / "a.jsonl", [record(0)])
    (tmp_path / "note.txt").write_text("")
    with pytest.raises(DataError, match=words):
        check_first_rows(DataSource(**settings))


# ------------------------------------------------------------------------------------------ larger than memory


class Counted(ParquetPieces):
    """Counts what is read, and the most that is held."""

    reads = 0

    def read(self, piece: int) -> Any:
        self.reads += 1
        return super().read(piece)


def test_a_large_file_is_read_group_by_group_and_each_once_per_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [write_parquet(tmp_path / f"{n}.parquet", range(n * 50, n * 50 + 50), group=10) for n in range(2)]
    group = pq.read_metadata(paths[0]).row_group(0)
    monkeypatch.setattr(tables, "HELD_BYTES", 4 * group.total_byte_size)
    pieces = Counted(paths)
    source = TableRows(pieces, PromptForm())
    blocks = source.blocks
    assert blocks is not None
    assert (blocks.sizes, 2 <= blocks.window <= 5) == ((10,) * 10, True)
    assert pieces.reads == 0, "opened, it is not read"
    order = DataOrder(100, seed=1, shuffle=True, epochs=None, blocks=blocks)
    seen = [source.rows([order.locate(ordinal)[1]])[0].prompt for ordinal in range(1, 101)]
    assert sorted(seen) == sorted(f"{number}+1=" for number in range(100))
    assert pieces.reads <= 10
    assert len(source._held) <= blocks.window


def test_a_null_in_a_large_file_is_found_when_it_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "HELD_BYTES", 1)
    rows = [record(i) for i in range(30)]
    rows[25]["reward_model"]["ground_truth"] = None
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "d.parquet", row_group_size=10)
    with pytest.raises(DataError, match=r"row 25: field `reward_model.ground_truth`"):
        open_file(tmp_path / "d.parquet")


def test_first_rows_of_a_large_file_keep_its_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "HELD_BYTES", 1)
    source = open_file(write_parquet(tmp_path / "d.parquet", range(30), group=10), rows=12)
    assert source.blocks is not None
    assert source.blocks.sizes == (10, 2)
    assert len(source) == 12


def test_files_with_other_columns_are_refused(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", range(2))
    pq.write_table(pa.Table.from_pylist([record(0, ability=...)]), tmp_path / "b.parquet")
    with pytest.raises(DataError, match=r"b\.parquet has other columns .*: ability"):
        open_file(tmp_path)


# ------------------------------------------------------------------------------------------ TRL's form


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_columns_of_trl_go_to_the_reward(tmp_path: Path, suffix: str) -> None:
    rows = [{"prompt": [{"role": "user", "content": f"{i}?"}], "solution": str(i), "level": i} for i in range(3)]
    path = tmp_path / f"sums.{suffix}"
    if suffix == "jsonl":
        write_jsonl(path, rows)
    else:
        pq.write_table(pa.Table.from_pylist(rows), path)
    row = open_file(path).rows([2])[0]
    assert (row.data_source, row.ground_truth) == ("sums", "2")
    assert row.extra_info == {"solution": "2", "level": 2, "prompt_messages": [{"role": "user", "content": "2?"}]}
    named = open_file(path, name="addition", ground_truth_key="level").rows([1])[0]
    assert (named.data_source, named.ground_truth) == ("addition", 1)
    with pytest.raises(DataError, match="row 0: field `truth` is missing"):
        open_file(path, ground_truth_key="truth")


def test_prompts_alone_are_enough(tmp_path: Path) -> None:
    row = open_file(write_jsonl(tmp_path / "d.jsonl", [{"prompt": "1"}, {"prompt": "2"}])).rows([1])[0]
    assert (row.prompt, row.ground_truth, row.extra_info) == ("2", None, {})


def test_the_first_row_decides_the_form(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "d.jsonl", [record(0), {"prompt": "1", "answer": "2"}])
    with pytest.raises(DataError, match="row 1: field `data_source` is missing"):
        open_file(path)
    with pytest.raises(DataError, match="row 1: field `reward_model` is missing"):
        open_file(path, name="sums")


def test_rows_without_a_data_source_take_the_name(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "d.jsonl", [record(0, data_source=...), record(1)])
    assert [row.data_source for row in open_file(path, name="sums").rows([0, 1])] == ["sums", "addition"]
