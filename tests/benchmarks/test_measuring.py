"""Results that the benchmarks compute from their runs."""

from __future__ import annotations

import json
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

from benchmarks.common import REPOSITORY, machine, summarize, table, write_json, yardstick
from benchmarks.faults import chaos, freezes
from benchmarks.mesh_run import MeshRun, window
from benchmarks.peers.trl_grpo import load_reward, parse_arguments
from benchmarks.services import scoring
from benchmarks.whole_loop import async_vs_sync, vs_trl
from benchmarks.whole_loop.async_vs_sync import REGIMES, contenders
from benchmarks.whole_loop.gemm import Floor, measure_floor, weight_shapes
from benchmarks.workloads import WORKLOADS, build_model, build_tokenizer


def test_summaries() -> None:
    summary = summarize([3.0, 1.0, 2.0])
    assert (summary.median, summary.low, summary.high, summary.runs) == (2.0, 1.0, 3.0, 3)
    assert summary.spread == 1.0
    with pytest.raises(ValueError, match="nothing was measured"):
        summarize([])


def test_results_name_their_machine(tmp_path: Path) -> None:
    write_json(tmp_path / "out" / "result.json", {"machine": machine(), "rate": summarize([2.0, 4.0])})
    found = json.loads((tmp_path / "out" / "result.json").read_text(encoding="utf-8"))
    assert found["machine"]["cores"] >= 1
    assert found["rate"] == {"median": 3.0, "low": 2.0, "high": 4.0, "runs": 2, "spread": 0.6667}
    assert yardstick(0.02).keys() == {"python_mturns_s", "matmul_gflops", "load_1min"}


@pytest.mark.parametrize(
    ("script", "defaults"),
    [
        (chaos, {"--minutes MINUTES of faults": "10.0", "--seed SEED of the run": "1", "--staleness STALENESS": "2"}),
        (freezes, {"--freezes FREEZES how many": "50", "--seed SEED of services": "1", "--frozen-after": "20.0"}),
        (scoring, {"--seconds SECONDS of one run": "2.0", "--workers WORKERS most": "1"}),
    ],
    ids=["chaos", "freezes", "scoring"],
)
def test_help_says_what_options_mean_and_their_defaults(
    script: ModuleType, defaults: dict[str, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmark", "--help"])
    with pytest.raises(SystemExit):
        script.main()
    shown = " ".join(capsys.readouterr().out.split("options:")[1].split())
    for option, default in defaults.items():
        assert f"(default: {default})" in shown.partition(option)[2].partition(" --")[0], option
    assert "None" not in shown


def test_table_is_markdown() -> None:
    assert table(("a", "b"), [(1, "x")]) == "| a | b |\n| --- | --- |\n| 1 | x |"


def test_floor_counts_the_models_matrices() -> None:
    workload = WORKLOADS["fixed-0.13m"]
    model = build_model(workload, build_tokenizer())
    matrices = [p for name, p in model.named_parameters() if p.dim() == 2 and "embed" not in name]
    counted = sum(inputs * outputs for inputs, outputs in weight_shapes(workload))
    assert counted == pytest.approx(sum(p.numel() for p in matrices), rel=0.01)
    floor = measure_floor(workload, 16.0)
    assert floor.generation_s > 0
    assert floor.gflops > 0
    assert Floor(1.0, 3.0, 1.0).step_s(2) == 2.0


def test_window_leaves_the_warm_up_out(tmp_path: Path) -> None:
    steps = [
        {"wall_s": 10.0 + index, "timing_s/gen": 0.25, "timing_s/update_actor": 0.5, "response_length/mean": 8.0}
        for index in range(6)
    ]
    measured = window(MeshRun(tmp_path, steps, {}), warmup=2)
    assert (measured.seconds, measured.batches, measured.mean_length) == (4.0, 4, 8.0)
    assert (measured.wait_s, measured.train_s) == (1.0, 2.0)
    with pytest.raises(ValueError, match="too few"):
        window(MeshRun(tmp_path, steps, {}), warmup=5)


def test_the_mesh_warms_up_longer_than_it_may_hold_ahead() -> None:
    """Groups generated before the window must not count as generated within it."""
    for regime in REGIMES.values():
        assert regime.warmup > contenders(2)[0].max_staleness + 1
    for name in WORKLOADS:
        assert vs_trl._MESH[name].warmup > 4 + 1


def test_synchronous_contender_tries_both_layouts() -> None:
    layouts = {(c.learner_threads, c.generator_threads) for c in contenders(2) if c.max_staleness == 0}
    assert layouts == {(1, 1), (2, 2)}


def test_peer_states_its_requirements_and_takes_what_we_pass(tmp_path: Path) -> None:
    text = vs_trl.PEER.read_text(encoding="utf-8")
    block = text.split("# /// script\n")[1].split("# ///")[0]
    header = tomllib.loads("".join(line.removeprefix("# ") + "\n" for line in block.splitlines()))
    assert any(requirement.startswith("trl") for requirement in header["dependencies"])
    args = parse_arguments(["--model", "m", "--data", "d", "--reward", vs_trl.REWARD, "--max-tokens", "16"])
    assert load_reward(args.reward)(completions=["az"], ground_truth=["a"], prompts=["p"]) == [0.5]


@pytest.mark.parametrize("module", [vs_trl, async_vs_sync])
def test_scripts_say_how_to_run_them(module: object) -> None:
    assert f"python -m {module.__name__} " in (module.__doc__ or "")
    assert (REPOSITORY / "benchmarks").is_dir()
