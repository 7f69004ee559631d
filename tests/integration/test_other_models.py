"""`rollmesh run` on other people's models, data and rewards: sharded bfloat16, BPE, chat messages in JSONL, and a
reward function that does what none should. Once more from a wheel, among modules of the user's that are called as its
parts are; that these are never imported: test_wheel.py.

The architecture whose weights go through most hands: experts, whose tensors the library regroups. That every
architecture computes alike in generator and learner: tests/generators/engines, tests/learner/engines.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.generators.engines import tiny
from tests.integration.mesh import MeshRun, audit
from tests.integration.wheel import unpack, write_namesakes

_TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% if terse %}!{% endif %}{% endif %}"
)
# Every fourth response at first is answered by the worst that a function can do, until each act was done twice. An act
# that keeps a core busy is done once. Each leaves signs of itself. Some of the others raise, and some are no number.
_SCORER = """
import os, re, time, zlib
from pathlib import Path

ACTS = {
    "spin": lambda: 9 ** (9 ** 9),
    "regex": lambda: re.match(r"(a+)+b", "a" * 80),
    "exit": lambda: os._exit(3),
    "sleep": lambda: time.sleep(600),
}

def compute_score(data_source, solution_str, ground_truth, extra_info):
    place = zlib.crc32(f"{extra_info['index']} {solution_str}".encode()) % 16
    if place < len(ACTS):
        name = list(ACTS)[place]
        signs = Path(__file__).with_name(f"{name}.done")
        with signs.open("a") as file:
            file.write("!")
        if signs.stat().st_size <= (1 if name in ("spin", "regex") else 2):
            ACTS[name]()
    case = len(solution_str) % 4
    if case == 0:
        raise KeyError("no such answer")
    return float("nan") if case == 1 else float(case)
"""


def _model(folder: Path) -> Path:
    model = tiny.build_model(tiny.configs()["qwen3_moe"]).to(torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="30KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 1, "the point is more than one shard"
    tokenizer = tiny.train_tokenizer()
    tokenizer.chat_template = _TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


def _from_a_wheel(built: Path, folder: Path) -> dict[str, Any]:
    return {
        "env": {"PYTHONPATH": str(unpack(built, folder / "site"))},
        "cwd": write_namesakes(folder / "home"),
    }


@pytest.mark.slow
@pytest.mark.parametrize("installed", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_a_run_on_another_architecture_whatever_a_reward_function_does(
    start_mesh: Callable[..., MeshRun], request: pytest.FixtureRequest, tmp_path: Path, installed: bool
) -> None:
    model = _model(tmp_path / "model")
    rows = [
        {
            "data_source": "custom",
            "prompt": [{"role": "user", "content": f"what is {n} + 35"}],
            "reward_model": {"style": "rule", "ground_truth": str(n + 35)},
            "extra_info": {"index": n},
        }
        for n in range(64)
    ]
    data = tmp_path / "train.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    scorer = tmp_path / "scorer.py"
    scorer.write_text(_SCORER)
    run = start_mesh(
        f"--model.path={model}",
        f"--data.train={data}",
        "--data.eval=null",
        "--data.chat_template_kwargs={terse: true}",
        f"--reward.functions=['{scorer}:compute_score']",
        # The place nearer to the service that must not be harmed: the generator.
        "--reward.in_process=true",
        "--reward.scorer_timeout_s=1",
        "--rollout.replicas=1",
        "--rollout.max_prompt_tokens=64",
        "--rollout.max_response_tokens=12",
        "--buffer.max_staleness=0",
        "--learner.batch.groups=4",
        "--rollout.hf.routed_experts=true",
        "--learner.router.replay=true",
        "--learner.optimizer.lr=1e-5",
        "--learner.steps=5",
        **_from_a_wheel(request.getfixturevalue("built"), tmp_path) if installed else {},
    )
    assert run.finish() == 0, run.tail()
    audit(run)
    acts = {path.stem for path in tmp_path.glob("*.done")}
    assert acts == {"spin", "regex", "exit", "sleep"}, "the run was long enough to meet all of them"
    log = (run.folder / "logs" / "generator-0.log").read_text()
    assert "no answer within 1 s; its worker was ended" in log
    assert "its worker died: exit code 3" in log
    steps = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    rewards = [row for row in steps if "critic/score/mean" in row]
    assert min(row["critic/score/min"] for row in rewards) >= 2.0, "what failed is in no statistic"
    assert len(rewards) == 5
    assert sum(row["unscored_members"] for row in rewards) > 0
    drifts = [row["rollout_corr/log_ratio_max"] for row in steps if "rollout_corr/log_ratio_max" in row]
    assert drifts, "no step had a gradient"
    assert max(drifts) < 1e-4, "the learner recomputes what the generator sampled from"
    trained = [row for row in steps if "actor/router_drift" in row]
    assert len(trained) == len(drifts)
    assert min(row["actor/router_replayed"] for row in trained) == 1.0, "a prompt's experts come with one member"
    assert max(row["actor/router_drift"] for row in trained) < 0.05, "both compute in float32"
    samples = [json.loads(line) for line in (run.folder / "samples.jsonl").read_text().splitlines()]
    assert all(row["prompt"].endswith("<assistant>!") for row in samples), samples[:1]
