"""A whole run with a reward function that does what none should."""

from pathlib import Path

import pytest

from tests.integration.mesh import audit

# One response in fifty or so is answered by the worst that a function can do, until each act was done three times. Each
# leaves signs of itself.
_WORST = """
import os, re, time, zlib
from pathlib import Path

ACTS = {
    "spin": lambda: 9 ** (9 ** 9),
    "regex": lambda: re.match(r"(a+)+b", "a" * 80),
    "exit": lambda: os._exit(3),
    "sleep": lambda: time.sleep(600),
}

def compute_score(data_source, solution_str, ground_truth, extra_info):
    place = zlib.crc32(f"{extra_info['index']} {solution_str}".encode()) % 200
    if extra_info["split"] == "train" and place < len(ACTS):
        name = list(ACTS)[place]
        signs = Path(__file__).with_name(f"{name}.done")
        with signs.open("a") as file:
            file.write("!")
        if signs.stat().st_size <= 3:
            ACTS[name]()
    return float(solution_str.strip() == str(ground_truth)) + 0.001 * len(set(solution_str))
"""


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_run_ends_as_it_would_have_whatever_a_reward_function_does(start_mesh, tmp_path: Path) -> None:
    (tmp_path / "worst.py").write_text(_WORST)
    run = start_mesh(
        "--learner.steps=8",
        "--rollout.replicas=1",
        f"--reward.functions=[{tmp_path / 'worst.py'}:compute_score]",
        # Of the two places the nearer one to what must not be harmed: the generator.
        "--reward.in_process=true",
        "--reward.scorer_timeout_s=1.5",
    )
    assert run.finish(200.0) == 0, run.tail()
    audit(run)
    assert len(run.metric("critic/score/mean")) == 8, run.tail()
    acts = {path.stem for path in tmp_path.glob("*.done")}
    assert acts == {"spin", "regex", "exit", "sleep"}, "the run was long enough to meet all of them"
    log = (run.folder / "logs" / "generator-0.log").read_text()
    assert "no answer within 1.5 s; its worker was ended" in log
    assert "its worker died: exit code 3" in log
