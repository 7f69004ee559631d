"""`rollmesh run` on other people's models, data and rewards: sharded bfloat16, BPE, chat messages in JSONL, and a
scorer that raises or answers NaN.

The architecture whose weights go through most hands: experts, whose tensors the library regroups. That every
architecture computes alike in generator and learner: tests/generators/engines, tests/learner/engines.
"""

import json
from pathlib import Path

import pytest
import torch

from tests.generators.engines import tiny
from tests.integration.mesh import audit

_TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% if terse %}!{% endif %}{% endif %}"
)


def _model(folder: Path) -> Path:
    model = tiny.build_model(tiny.configs()["qwen3_moe"]).to(torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="30KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 1, "the point is more than one shard"
    tokenizer = tiny.train_tokenizer()
    tokenizer.chat_template = _TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_run_on_another_architecture(start_mesh, tmp_path: Path) -> None:
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
    scorer.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    case = len(solution_str) % 4\n"
        "    if case == 0:\n        raise KeyError('no such answer')\n"
        "    return float('nan') if case == 1 else float(case)\n"
    )
    run = start_mesh(
        f"--model.path={model}",
        f"--data.train={data}",
        "--data.eval=null",
        "--data.chat_template_kwargs={terse: true}",
        f"--reward.functions=['{scorer}:compute_score']",
        "--rollout.replicas=1",
        "--rollout.max_prompt_tokens=64",
        "--rollout.max_response_tokens=12",
        "--buffer.max_staleness=0",
        "--learner.batch.groups=4",
        "--learner.optimizer.lr=1e-5",
        "--learner.steps=5",
    )
    assert run.finish() == 0, run.tail()
    audit(run)
    steps = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    rewards = [row for row in steps if "critic/score/mean" in row]
    assert min(row["critic/score/min"] for row in rewards) >= 2.0, "what failed is in no statistic"
    assert sum(row["unscored_members"] for row in rewards) > 0
    drifts = [row["rollout_corr/log_ratio_max"] for row in steps if "rollout_corr/log_ratio_max" in row]
    assert drifts, "no step had a gradient"
    assert max(drifts) < 1e-4, "the learner recomputes what the generator sampled from"
    samples = [json.loads(line) for line in (run.folder / "samples.jsonl").read_text().splitlines()]
    assert all(row["prompt"].endswith("<assistant>!") for row in samples), samples[:1]
