"""The `rollmesh` command: what it prints, and how it fails."""

from __future__ import annotations

import gc
import importlib.util
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

import pytest
import yaml

from rollmesh.cli.app import PERMANENT_CODE_VARIABLE, _without_options
from rollmesh.cli.override_forms import arranged
from rollmesh.launcher import folder
from rollmesh.launcher.preflight import checks
from rollmesh.learner.recovery.run_identity import RunRecord
from rollmesh.mesh.config import load_config, parse_overrides
from rollmesh.mesh.config.models import Config
from rollmesh.mesh.errors import ConfigError, UnreachableError
from rollmesh.mesh.runtime.fork_server.client import ForkServer
from rollmesh.protos import buffer_pb2
from rollmesh.report.summary import FinalState, write_summary
from tests import fork_server
from tests.command import Command
from tests.repository import REPOSITORY
from tests.tiny_folder import write_tiny_folder

_FROM_A_FILE = f"{REPOSITORY}/examples/dataflows/rejection_sampling.py:RejectionSampling"


@pytest.fixture(autouse=True)
def patient_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trial that a busy machine makes slow is not given up: it would say nothing."""
    for limit in ("_REWARD_S", "_LEARNER_S"):
        monkeypatch.setattr(checks, limit, 600.0)


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    model = write_tiny_folder(tmp_path / "model")
    data = tmp_path / "train.jsonl"
    data.write_text(json.dumps({"prompt": "1+1=", "data_source": "arithmetic", "reward_model": {"ground_truth": "2"}}))
    path = tmp_path / "cfg.yaml"
    values = {
        "run": {"dir": str(tmp_path / "runs")},
        "model": {"path": str(model)},
        "data": {"train": str(data)},
        "algorithm": "grpo",
    }
    path.write_text(yaml.safe_dump(values))
    return path


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def assert_error(result: subprocess.CompletedProcess[str], status: int, message: str) -> None:
    """One `error:` line with the message, the status, and no traceback."""
    assert result.returncode == status, result.stderr
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, result.stderr
    assert message in errors[0]
    assert "Traceback" not in result.stderr + result.stdout


@pytest.mark.parametrize("command", [(), ("run",), ("generator",)])
def test_help_names_the_engines_and_where_to_read_on(rollmesh: Command, command: tuple[str, ...]) -> None:
    shown = rollmesh(*command, "--help")
    assert shown.returncode == 0
    words = set(re.findall(r"[\w./]+", shown.stdout.replace(".\n", "\n")))
    assert {"hf", "vllm", "sglang"} <= words
    [page] = {word for word in words if word.startswith("docs/")}
    assert (REPOSITORY / page.rstrip(".")).is_file()


def test_version_is_that_of_the_package(rollmesh: Command) -> None:
    shown = rollmesh("--version")
    assert (shown.returncode, shown.stdout) == (0, f"rollmesh {metadata.version('rollmesh')}\n")


def test_what_a_command_loads_is_seldom_searched_for_cycles(rollmesh: Command) -> None:
    gc.set_threshold(700, 10, 10)
    rollmesh("--version")
    assert gc.get_threshold()[0] >= 10_000


def test_what_a_restart_does_not_mend_can_end_well_for_services(
    rollmesh: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing, bounds = str(tmp_path / "cfg.yaml"), []
    monkeypatch.setattr("rollmesh.cli.app.bound_exit", lambda status, _: bounds.append(status))
    assert rollmesh("learner", missing, "--mesh", "127.0.0.1:1").returncode == ConfigError.exit_code
    monkeypatch.setenv(PERMANENT_CODE_VARIABLE, "0")
    ended = rollmesh("learner", missing, "--mesh", "127.0.0.1:1")
    assert ended.returncode == 0
    assert bounds == [ConfigError.exit_code, 0], "a learner's exit is bounded, with the same code"
    assert missing in ended.stderr
    assert rollmesh().returncode == 2, "how it is used"
    assert rollmesh("run", missing).returncode == ConfigError.exit_code
    assert rollmesh("status", "--mesh", "127.0.0.1:1").returncode == UnreachableError.exit_code


@pytest.mark.parametrize("command", ["run", "eval"])
def test_a_wrong_configuration_costs_no_loading(
    rollmesh: Command, config_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """The server that forks services loads what they share once the configuration is read, and not before."""
    loads = 77

    class Loading(ForkServer):
        def __init__(self) -> None:
            pass

        def load(self) -> None:
            raise SystemExit(loads)

        def close(self) -> None:
            pass

    monkeypatch.setattr("rollmesh.cli.app.ForkServer.fork_here", lambda _: Loading())
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "rollmesh"])
    given = [f"--data.eval={config_file.parent / 'train.jsonl'}"]
    assert rollmesh(command, str(tmp_path / "none.yaml"), *given).returncode == ConfigError.exit_code
    assert rollmesh(command, str(config_file), "--learner.steps=-1", *given).returncode == ConfigError.exit_code
    assert rollmesh(command, str(config_file), *given).returncode == loads


@pytest.mark.parametrize(
    ("command", "forks"),
    [
        ("/env/bin/python /env/bin/rollmesh run", True),
        ("python -m rollmesh run", True),
        ("python -m rollmesh.cli run", True),
        ("python -P -m rollmesh.cli run", True),
        ("python -P", False),
        ("python -X dev -m rollmesh run", False),
        ("python -m pytest", False),
        ("python -m", False),
        ("python", False),
    ],
)
def test_services_inherit_no_options_of_the_interpreter(command: str, forks: bool) -> None:
    assert _without_options(command.split()) is forks


def test_help_loads_nothing_heavy() -> None:
    script = """
import sys
sys.argv = ["rollmesh", "--help"]
from rollmesh.cli import main
try:
    main()
except SystemExit as end:
    assert end.code == 0, end.code
heavy = {"torch", "transformers", "grpc", "numpy", "matplotlib", "redis", "rich.live"} & set(sys.modules)
assert not heavy, heavy
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=REPOSITORY, check=False)
    assert result.returncode == 0, result.stderr
    for command in (
        "run",
        "buffer",
        "reward",
        "generator",
        "learner",
        "status",
        "ledger",
        "samples",
        "config",
        "export",
    ):
        assert f"  {command} " in result.stdout


def test_unknown_key_names_the_nearest(rollmesh: Command, config_file: Path) -> None:
    result = rollmesh("config", "show", str(config_file), "--rollout.replica=3")
    assert_error(result, 2, "unknown key rollout.replica, did you mean rollout.replicas?")


def test_debug_shows_the_traceback(config_file: Path) -> None:
    result = fork_server.run(["config", "show", str(config_file), "--rollout.replica=3", "--debug"])
    assert "Traceback" in result.stderr
    assert "did you mean rollout.replicas?" in result.stderr


def test_override_without_value_says_the_form(rollmesh: Command, config_file: Path) -> None:
    assert_error(rollmesh("config", "show", str(config_file), "--rollout.n"), 2, "write --rollout.n=VALUE")


@pytest.mark.parametrize(
    "arguments",
    [
        ("CFG", "--learner.steps=7", "--algorithm=dapo", "--rollout.seed=-1"),
        ("--learner.steps", "7", "CFG", "--algorithm", "dapo", "--rollout.seed", "-1"),
        ("learner.steps=7", "algorithm=dapo", "--dry-run", "CFG", "rollout.seed=-1"),
        ("--from-checkpoint", "a=b", "CFG", "learner.steps=7", "--algorithm", "dapo", "--rollout.seed=-1", "--fresh"),
    ],
)
def test_overrides_are_taken_as_people_type_them(arguments: tuple[str, ...]) -> None:
    own = {"--dry-run": True, "--fresh": True, "--from-checkpoint": False}
    given = arranged(arguments, own)
    options = {item for item in given if item.partition("=")[0] in own} | {"a=b", "CFG"}
    overrides = [item for item in given if item not in options]
    assert parse_overrides(overrides) == {"learner.steps": 7, "algorithm": "dapo", "rollout.seed": -1}
    assert given[len(given) - len(overrides) :] == overrides


def test_every_command_with_overrides_takes_them_so(rollmesh: Command, config_file: Path) -> None:
    typed = ("config", "show", "rollout.n=3", str(config_file), "--learner.steps", "7", "--algorithm", "dapo")
    shown = yaml.safe_load(rollmesh(*typed).stdout)
    assert (shown["rollout"]["n"], shown["learner"]["steps"], shown["algorithm"]["name"]) == (3, 7, "dapo")


def test_the_list_of_commands_cuts_no_sentence(rollmesh: Command) -> None:
    shown = rollmesh("--help").stdout
    assert "..." not in shown.partition("Commands:")[2]
    assert "Run the whole mesh here: buffer, reward service, generators, learner." in " ".join(shown.split())


def test_the_short_option_for_help_is_taken_everywhere(rollmesh: Command) -> None:
    for command in ((), ("run",), ("reward",), ("config", "show"), ("data", "check")):
        assert rollmesh(*command, "-h").stdout == rollmesh(*command, "--help").stdout


def test_the_package_can_be_run_and_looked_at() -> None:
    code = "import rollmesh; print(rollmesh.__version__, {'train', 'Run'} <= set(dir(rollmesh)))"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=240)
    assert shown.stdout == f"{metadata.version('rollmesh')} True\n"
    assert importlib.util.find_spec("rollmesh.__main__") is not None


def test_missing_configuration(rollmesh: Command, tmp_path: Path) -> None:
    missing = rollmesh("run", str(tmp_path / "none.yaml"))
    assert_error(missing, 2, "cannot read configuration")
    assert "rollmesh init" in missing.stderr


def test_missing_model_folder(rollmesh: Command, config_file: Path) -> None:
    result = rollmesh("run", str(config_file), "--model.path=/nowhere/model")
    assert_error(result, 3, "model.path: no such folder: /nowhere/model")
    assert "hint: set model.path to a folder that exists" in result.stderr


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda model: (model / "config.json").write_text('{"a'), "model/config.json is not valid JSON: "),
        (lambda model: os.truncate(model / "model.safetensors", 30), "model/model.safetensors is cut off or damaged"),
        (lambda model: (model / "tokenizer.json").unlink(), "model has no tokenizer"),
    ],
)
def test_a_damaged_model_is_named_before_anything_starts(
    rollmesh: Command, config_file: Path, tmp_path: Path, damage: Callable[[Path], object], message: str
) -> None:
    damage(tmp_path / "model")
    result = rollmesh("run", str(config_file))
    assert_error(result, 3, message)
    assert "error: model.path: " in result.stderr
    assert not (tmp_path / "runs").exists()


def test_a_model_that_hf_does_not_serve_is_refused_before_anything_starts(
    rollmesh: Command, config_file: Path, tmp_path: Path
) -> None:
    layers = {"model_type": "lfm2", "num_hidden_layers": 2, "full_attn_idxs": [1]}
    (tmp_path / "model" / "config.json").write_text(json.dumps(layers))
    assert_error(rollmesh("run", str(config_file)), 3, "(lfm2) has layers of the kind conv")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("fresh", [False, True])
def test_another_algorithm_than_the_checkpoints_is_refused_before_anything_starts(
    rollmesh: Command, config_file: Path, tmp_path: Path, taken_port: int, fresh: bool
) -> None:
    checkpoint = tmp_path / "runs" / "run" / "checkpoints" / "i0001-v00000003"
    checkpoint.mkdir(parents=True)
    state = {"extra": {"algorithm": {"name": "ActorCritic", "state": {}}}}
    (checkpoint / "state.json").write_text(json.dumps(state))
    result = rollmesh("run", str(config_file), f"--network.port={taken_port}", *(["--fresh"] if fresh else []))
    if fresh:
        assert_error(result, 6, "cannot bind")
        return
    assert_error(result, 3, "holds the state of the algorithm ActorCritic, not of")
    assert [path.name for path in checkpoint.parents[1].iterdir()] == ["checkpoints"]


@pytest.mark.parametrize(
    ("override", "status", "message"),
    [
        ("rollout.max_response_tokens=4096", 2, "= 5120, but the longest sequence that the model takes"),
        ("reward.functions=[gsm9k]", 8, "unknown reward function 'gsm9k'"),
        ("reward.functions=[nowhere.py:mine]", 8, "no file nowhere.py"),
        ("data.prompt_key=question", 3, "row 0: field `question` is missing"),
        ("algorithm.name=grppo", 2, "did you mean 'grpo'"),
    ],
)
def test_what_one_second_shows_is_said_before_anything_starts(
    rollmesh: Command, config_file: Path, tmp_path: Path, override: str, status: int, message: str
) -> None:
    result = rollmesh("run", str(config_file), f"--{override}")
    assert (result.returncode, result.stderr.count(message)) == (status, 1), result.stderr
    assert not (tmp_path / "runs").exists()


def test_missing_data_file(rollmesh: Command, config_file: Path) -> None:
    assert_error(
        rollmesh("run", str(config_file), "--data.eval=/nowhere/eval.parquet"),
        3,
        "data.eval: dataset /nowhere/eval.parquet does not exist",
    )


def test_a_taken_port_ends_the_run(rollmesh: Command, config_file: Path, taken_port: int, tmp_path: Path) -> None:
    """Summary and report say it too, although the run never trained."""
    result = rollmesh("run", str(config_file), f"--network.port={taken_port}")
    why = f"cannot bind 127.0.0.1, port {taken_port}"
    assert_error(result, 6, why)
    run = tmp_path / "runs" / "run"
    ended = json.loads((run / "summary.json").read_text())["ended"]
    assert ended.startswith("error port_in_use: ")
    assert why in ended
    assert why in (run / "report.html").read_text()


def test_unreachable_mesh(rollmesh: Command) -> None:
    for command in ("status", "ledger"):
        assert_error(rollmesh(command, "--mesh", "127.0.0.1:9"), 5, "mesh 127.0.0.1:9")


def test_folder_of_no_run(rollmesh: Command, tmp_path: Path) -> None:
    assert_error(rollmesh("status", str(tmp_path)), 3, f"{tmp_path} is not a run folder")
    assert_error(rollmesh("samples", str(tmp_path)), 3, "no samples in")
    assert_error(rollmesh("report", str(tmp_path)), 3, f"{tmp_path} is not a run folder")
    assert_error(rollmesh("export", str(tmp_path), str(tmp_path / "out")), 3, f"{tmp_path} is not a run folder")


def test_run_folder_in_use(rollmesh: Command, config_file: Path, tmp_path: Path) -> None:
    with folder.locked(tmp_path / "runs" / "run"):
        assert_error(rollmesh("run", str(config_file)), 42, "is in use: another command works there")


def test_unreachable_reward_service(rollmesh: Command) -> None:
    result = rollmesh("reward", "check", "grpc://127.0.0.1:9", "--timeout", "2")
    assert result.returncode == UnreachableError.exit_code
    assert "not usable" in result.stdout
    assert "Traceback" not in result.stderr


def test_reward_without_subcommand_serves(config_file: Path, taken_port: int) -> None:
    result = fork_server.run(["reward", str(config_file), "--port", str(taken_port)])
    assert result.returncode == 6
    assert f"cannot bind 127.0.0.1:{taken_port}" in result.stderr


def test_show_applies_overrides(rollmesh: Command, config_file: Path) -> None:
    shown = yaml.safe_load(rollmesh("config", "show", str(config_file), "--rollout.n=3", "--algorithm.name=x").stdout)
    assert Config.model_validate(shown).rollout.n == 3
    assert shown["algorithm"]["name"] == "x"


def test_schema_has_every_key(rollmesh: Command) -> None:
    lines = rollmesh("config", "schema").stdout.splitlines()
    keys = {line.split(" = ")[0] for line in lines if " = " in line and not line.startswith(" ")}
    assert {"model.path", "buffer.max_staleness", "learner.optimizer.lr"} <= keys
    assert "properties" in json.loads(rollmesh("config", "schema", "--json").stdout)


def test_explain_derives_sizes(rollmesh: Command, config_file: Path, tmp_path: Path) -> None:
    (tmp_path / "model" / "config.json").write_text('{"max_position_embeddings": 4096}')
    overrides = ["--learner.batch.groups=10", "--rollout.n=4", "--buffer.max_staleness=3"]
    explained = rollmesh("config", "explain", str(config_file), *overrides).stdout
    assert "samples per step: 10 groups x 4 responses = 40" in explained
    assert "live groups: at most 10 x (3 + 1) = 40" in explained
    assert "thread(s)" in explained
    assert "devices: " in explained
    assert "without effect: algorithm.loss.clip_low" in explained
    assert (
        "learner: fsdp2 on 1 rank; bfloat16 on CUDA, activations recomputed; float32 on a CPU, activations kept"
        in explained
    )
    # The model of these tests is none.
    assert "packing: not known: cannot load model" in explained


def test_explain_has_every_deadline_that_ends_something(rollmesh: Command, config_file: Path) -> None:
    overrides = ["--resources.frozen_after_s=10", "--buffer.fronts=3", "--reward.workers=5", "--buffer.stall_s=50"]
    explained = rollmesh("config", "explain", str(config_file), *overrides, "--buffer.durability=everysec").stdout
    assert "stalls: reported once there was no progress for 50 s; the run ends then: 1800 s" in explained
    assert "after 10 s stopped, 10 s of processor time or 30 s asleep" in explained
    assert (
        "engine: 10 / 300 / 90 s), or where a learner's step lasts 20 times as long as the longest, 600 s" in explained
    )
    assert "at most 5 processes, in the reward service; a call that is not done after 8 s" in explained
    assert "buffer: 3 front(s) on an embedded Redis; its last two seconds may be lost" in explained
    never = rollmesh("config", "explain", str(config_file), "--resources.frozen_after_s=0").stdout
    assert "frozen services: not detected" in never


def test_ledger_and_status_of_a_run_that_has_ended(
    rollmesh: Command, config_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config(config_file)
    RunRecord(config, None).write()
    # Nothing sums up services that were started one by one.
    alone = rollmesh("status", str(config.run.folder))
    assert_error(alone, 3, "is not in progress")
    assert f"`rollmesh report {config.run.folder}`" in alone.stderr
    counts = buffer_pb2.LedgerCounts(admitted=3, trained=1, failed=2)
    counts.reasons["failed/members"] = 2
    answer = buffer_pb2.LedgerResponse(counters=counts)
    answer.failed.add(causes=["reward timeout: 8 s", "reward timeout: 8 s"])
    write_summary(config.run.folder, config, FinalState(ledgers={"train": answer}))
    run = str(config.run.folder)
    shown = rollmesh("ledger", run, "--failed")
    assert shown.returncode == 0, shown.stderr
    lines = [" ".join(line.split()) for line in shown.stdout.splitlines()]
    assert {f"run {run} has ended; at its end:", "table train", "failed 2", "failed/members 2", "balances"} <= set(
        lines
    )
    assert lines[lines.index("causes of the latest failures:") + 1] == "2 x reward timeout: 8 s"
    told = json.loads(rollmesh("ledger", run, "--json").stdout)
    assert (told["balances"], told["tables"]["train"]["causes"]) == (True, {"reward timeout: 8 s": 2})
    assert_error(rollmesh("ledger", run, "--redrive", "all"), 3, "is not in progress")
    monkeypatch.chdir(tmp_path)
    assert rollmesh("ledger", "--failed").stdout.replace("runs/run", run) == shown.stdout, "the latest one"
    status = rollmesh("status", run)
    assert status.returncode == 0, status.stderr
    assert "2 training groups failed (members 2); mostly: reward timeout: 8 s" in status.stdout
    assert json.loads(rollmesh("status", run, "--json").stdout)["summary"]["groups_by_fate"]["failed"] == 2
    answer.discrepancies.append("ready: 1 counted, 0 found")
    write_summary(config.run.folder, config, FinalState(ledgers={"train": answer}))
    assert rollmesh("ledger", run).returncode == 1


def test_a_run_whose_launcher_was_killed_is_not_going(
    rollmesh: Command, config_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config(config_file)
    RunRecord(config, None).write()
    other = tmp_path / "runs" / "later"
    other.mkdir()
    with folder.locked(config.run.folder):
        for begun in (config.run.folder, other):
            folder.write_mesh(begun, "127.0.0.1:9")
        monkeypatch.chdir(tmp_path)
        assert_error(rollmesh("status"), UnreachableError.exit_code, "mesh 127.0.0.1:9")
    for command in (("status",), ("ledger",), ("weights", "verify")):
        result = rollmesh(*command, str(config.run.folder))
        assert_error(result, 3, f"run {config.run.folder} is not in progress: its launcher was killed")
        assert "`rollmesh run`, without --fresh and --from-checkpoint, continues it" in result.stderr


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("--learner.parallel.shards=3", "learner.parallel.shards: 3 does not divide"),
        ("--checkpoint.copy_to=s4://x/y", "Protocol not known: s4"),
        ("--learner.attention=flash_attention_3", "flash_attention_3 needs a CUDA device"),
    ],
)
def test_explain_refuses_what_a_run_refuses(rollmesh: Command, config_file: Path, override: str, said: str) -> None:
    assert_error(rollmesh("config", "explain", str(config_file), "--learner.device=cpu", override), 2, said)


def test_explain_names_settings_without_effect(rollmesh: Command, config_file: Path) -> None:
    explained = rollmesh("config", "explain", str(config_file), "--learner.profile.steps=[2,999]").stdout
    assert "without effect: learner.profile.steps 999" in explained


def test_explain_says_what_ends_the_run(rollmesh: Command, config_file: Path) -> None:
    explained = rollmesh("config", "explain", str(config_file), "--data.epochs=15").stdout
    assert (
        "schedules of the learning rate: after 100 steps, or after 15 pass(es) over the data where that is sooner"
        in explained
    )


def test_a_wrong_value_says_what_to_set_and_a_wrong_key_where_keys_are(rollmesh: Command, config_file: Path) -> None:
    wrong = rollmesh("config", "show", str(config_file), "--rollout.n=1")
    assert_error(wrong, 2, "buffer.min_members (2) exceeds rollout.n (1): set buffer.min_members=1")
    assert "hint" not in wrong.stderr
    assert "config schema" in rollmesh("config", "show", str(config_file), "--rollout.nn=1").stderr


def test_explain_spells_the_algorithm_out(rollmesh: Command, config_file: Path) -> None:
    overrides = ["--algorithm=dapo", "--algorithm.loss.clip_high=0.3", "--algorithm.kl.where=loss"]
    explained = rollmesh("config", "explain", str(config_file), *overrides).stdout
    rows = [line.split() for line in explained.splitlines() if line.startswith("  ")]
    found = {row[0]: (row[2], row[-1]) for row in rows}
    assert found["loss"] == ("ppo", "preset")
    assert found["loss.clip_high"] == ("0.3", "configuration")
    assert found["loss.clip_low"] == ("0.2", "preset")
    assert found["advantage.normalize_by_std"] == ("true", "default"), "a part's own settings are shown"
    assert found["kl.where"] == ("loss", "configuration")
    assert found["correction.mode"] == ("truncated_is", "default")
    assert "role reference: language model, not trained, fsdp2 on 1 rank, from" in explained
    assert "before its first optimizer step: the role reference" in explained


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ["--algorithm=ppo", "--learner.batch.minibatches=2", "--learner.roles.critic={path: org/critic}"],
            ["role critic: value model, trained", "from org/critic", "step: the actor, the role critic"],
        ),
        (["--algorithm=remax"], ["8 sampled responses (the algorithm needs 1 or more), and one decoded greedily"]),
        (["--algorithm=clip_cov"], ["before every optimizer step: the actor's, to select tokens"]),
        (["--algorithm=grpo", "--algorithm.entropy.coefficient=0.01"], ["the entropy is differentiated"]),
        (
            ["--algorithm=gdpo", "--algorithm.advantage.weights={style: 1.0, correct: 2.0}"],
            ["reward components: style, correct"],
        ),
    ],
)
def test_explain_says_what_the_algorithm_needs(
    rollmesh: Command, config_file: Path, overrides: list[str], words: list[str]
) -> None:
    explained = rollmesh("config", "explain", str(config_file), *overrides).stdout
    for word in words:
        assert word in explained


def test_algorithms_are_listed_with_what_they_are(rollmesh: Command) -> None:
    lines = rollmesh("config", "algorithms").stdout.splitlines()
    names = {line.split()[0] for line in lines}
    assert {"grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "remax", "ppo", "vapo", "prime", "opo", "gpg"} <= names
    assert all(len(line.split()) > 3 for line in lines)


@pytest.mark.parametrize("command", ["run", "config explain"])
@pytest.mark.parametrize(
    ("override", "message", "hint"),
    [
        ("--algorithm.los.clip_high=0.3", "algorithm.los: unknown setting", "did you mean 'loss'?"),
        ("--algorithm.loss.clip_hi=0.3", "algorithm.loss.clip_hi: unknown setting", "clip_high"),
        ("--algorithm=gprpo", "algorithm.name: unknown algorithm 'gprpo'", "did you mean 'grpo'?"),
        ("--algorithm.correction.mode=none", "algorithm.correction.mode: 'none' corrects for nothing", "truncated_is"),
        ("--learner.roles.critic.path=m/c", "learner.roles.critic: algorithm grpo has no such role", "its roles"),
        ("--algorithm=on_policy_distillation --algorithm.discuont=1", "algorithm.discuont: unknown", "'discount'"),
        (f"--algorithm={_FROM_A_FILE} --algorithm.aggergation=x", "algorithm.aggergation: unknown", "'aggregation'"),
    ],
)
def test_a_wrong_algorithm_is_refused_before_anything_starts(
    rollmesh: Command, config_file: Path, tmp_path: Path, command: str, override: str, message: str, hint: str
) -> None:
    result = rollmesh(*command.split(), str(config_file), *override.split())
    assert_error(result, 2, message)
    assert hint in result.stderr
    assert not (tmp_path / "runs").exists()


def test_missing_model_of_a_role(rollmesh: Command, config_file: Path) -> None:
    result = rollmesh("run", str(config_file), "--algorithm=ppo", "--learner.roles.critic.path=/nowhere/critic")
    assert_error(result, 3, "learner.roles.critic.path: no such folder: /nowhere/critic")


def test_a_teacher_with_other_tokens(rollmesh: Command, config_file: Path, tmp_path: Path) -> None:
    teacher = shutil.copytree(tmp_path / "model", tmp_path / "teacher")
    for path, vocabulary in ((tmp_path / "model", {"a": 0, "b": 1}), (teacher, {"a": 1, "b": 0})):
        (path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}}))
    result = rollmesh(
        *("run", str(config_file), "--algorithm=on_policy_distillation", f"--learner.roles.teacher.path={teacher}")
    )
    assert_error(result, 3, f"learner.roles.teacher.path: {teacher} has other tokens than model.path: 2 differ")
    assert "the tokenizer of model.path" in result.stderr


def test_a_dry_run_starts_nothing_and_finds_what_a_start_would(rollmesh: Command, config_file: Path) -> None:
    values = yaml.safe_load(config_file.read_text())
    found = rollmesh("run", str(config_file), "--dry-run", "--data.train=nowhere.parquet")
    assert found.returncode == 3
    assert "data.train: dataset nowhere.parquet does not exist" in found.stderr
    assert not Path(values["run"]["dir"]).exists()
