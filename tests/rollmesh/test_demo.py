"""The demonstration's data and model: what `rollmesh run` needs, from a seed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from examples.demo.prepare import main as prepare
from examples.demo.problems import LETTERS, split_problems
from rollmesh.learner.data.dataset import open_source
from rollmesh.mesh.config import load_config
from rollmesh.mesh.config.inputs import DataSource
from rollmesh.protos import reward_pb2
from rollmesh.reward_service.scoring.engine import ScoringEngine
from tests.repository import REPOSITORY

DEMO = REPOSITORY / "examples" / "demo" / "demo.yaml"


@pytest.mark.parametrize("task", ["arithmetic", "strings", "both", "code"])
def test_held_out_problems_are_not_trained(task: str) -> None:
    train, held_out = split_problems(task, largest_digit=4, held_out=100, seed=3)
    assert len(held_out) == 100
    assert {problem.prompt for problem in train}.isdisjoint(problem.prompt for problem in held_out)
    assert split_problems(task, largest_digit=4, held_out=100, seed=3) == (train, held_out)
    assert split_problems(task, largest_digit=4, held_out=100, seed=4)[1] != held_out


def test_small_digits_need_no_carry() -> None:
    train, held_out = split_problems("arithmetic", largest_digit=4, held_out=5, seed=0)
    assert len(train) + len(held_out) == 5**4
    for problem in train + held_out:
        left, right = problem.prompt.removesuffix("=").split("+")
        digits = [str(int(a) + int(b)) for a, b in zip(left, right, strict=True)]
        assert problem.answer == "".join(digits)


async def test_right_answers_score_one_and_others_zero() -> None:
    problems, _ = split_problems("both", largest_digit=9, held_out=1, seed=0)
    engine = ScoringEngine(["auto"])
    items = []
    for index, problem in enumerate(problems[:200]):
        row = problem.row(index, "train")
        items += [
            reward_pb2.ScoreItem(
                item_id=f"{index}-{right}",
                group_id=str(index),
                data_source=row["data_source"],
                prompt=row["prompt"],
                response=problem.answer if right else LETTERS,
                ground_truth_json=json.dumps(row["reward_model"]["ground_truth"]),
            )
            for right in (True, False)
        ]
    results = await engine.score(items, 20.0)
    await engine.close()
    for result in results:
        assert result.WhichOneof("outcome") == "scored"
        assert result.scored.total == float(result.item_id.endswith("True"))


def test_prepare_writes_what_a_run_needs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prepare(["--out", str(tmp_path), "--task", "both", "--warm-steps", "2", "--held-out", "20"])
    assert "supervised warm start: 2 steps, held-out accuracy 0.0" in capsys.readouterr().out
    for name in ("train.parquet", "eval.parquet"):
        (row,) = open_source(DataSource(path=str(tmp_path / name))).rows([0])
        assert row.data_source in ("demo/arithmetic", "demo/strings")
        assert row.ground_truth
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert model.config.model_type == "qwen3"
    text = "rev:abcd=dcba 12+34="
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode(text)) == len(text)
    assert json.loads((tmp_path / "prepared.json").read_text())["eval_rows"] == 20


def test_what_was_prepared_so_before_stays(tmp_path: Path) -> None:
    """A run may be under way in it."""

    def files() -> dict[str, int]:
        return {str(path): path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}

    arguments = ["--out", str(tmp_path), "--warm-steps", "1", "--held-out", "5"]
    prepare(arguments)
    first = files()
    prepare(arguments)
    assert files() == first
    prepare([*arguments, "--seed", "1"])
    assert all(files()[name] > written for name, written in first.items())


def test_demo_configuration_is_valid() -> None:
    config = load_config(DEMO)
    assert config.rollout.replicas == 2
    assert config.data.eval is not None
