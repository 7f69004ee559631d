"""Configuration: overrides, nearest names, contradictions, and that loading it is cheap."""

import contextlib
import gc
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import yaml

from rollmesh.mesh.config import Config, load_config, parse_overrides, yaml_text
from rollmesh.mesh.config.base import Section, section_of
from rollmesh.mesh.config.parallel import ParallelSection
from rollmesh.mesh.errors import ConfigError

MINIMAL = {"model": {"path": "m"}, "data": {"train": "d.parquet"}}


def test_overrides_are_read_as_yaml_and_win(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("model: {path: m}\ndata: {train: d.parquet}\nlearner: {steps: 7}\nalgorithm: grpo\n")
    config = load_config(
        path, ["--learner.steps=9", "rollout.stop=['a','b']", "--algorithm.loss.clip_low=0.1", "--run.name=x"]
    )
    assert config.learner.steps == 9
    assert config.rollout.stop == ["a", "b"]
    assert config.algorithm.name == "grpo"
    assert config.algorithm.params == {"loss": {"clip_low": 0.1}}
    assert config.run.folder == Path("runs/x")


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("--rolout.n=4", ["unknown key rolout", "did you mean rollout?"]),
        ("--learner.optimizer.lrr=1", ["unknown key learner.optimizer.lrr", "did you mean learner.optimizer.lr?"]),
        ("--rollout.n=0", ["rollout.n", "needs a number above 0"]),
        ("--rollout.temperature=0.001", ["rollout.temperature", "0.001 is below 0.01", "0 is greedy"]),
        ("--buffer.max_staleness=-1", ["buffer.max_staleness"]),
        ("--rollout.top_p=0.9", ["rollout.top_p", "off in training"]),
        ("--reward.timeout_s=100", ["deadlines must nest", "reward.timeout_s"]),
        ("--buffer.min_members=9", ["buffer.min_members (9) exceeds rollout.n (8)"]),
        ("--learner=3", ["learner"]),
        ("--learner.roles.critic.pth=m", ["unknown key learner.roles.critic.pth", "learner.roles.critic.path?"]),
        ("--learner.lora={r: 8}", ["unknown key learner.lora.r, did you mean learner.lora.rank?"]),
        ("--eval.k=4", ["unknown key eval.k, did you mean eval.n?"]),
        ("--learner.roles.critic.optimizer.lrr=1", ["did you mean learner.roles.critic.optimizer.lr?"]),
        ("--algorithm.params.loss=ppo", ["algorithm", "move what is below `params` one level up"]),
        ("nonsense", ["--section.key=value"]),
        ("--a.b=[", ["not YAML"]),
    ],
)
def test_a_bad_key_or_value_is_named(override: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(MINIMAL, [override])
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "placement.batches_per_turn=0",
            "placement.batches_per_turn: needs a number above 0; leave the key out for its default",
        ),
        (
            "placement=collocatd",
            "placement.mode: needs 'split', 'collocated', 'hybrid' or 'auto', did you mean collocated?",
        ),
        ("rollout.temperature=0.001", "rollout.temperature: 0.001 is below 0.01; 0 is greedy"),
        ("rollout.engine=trt", "rollout.engine: needs 'hf', 'vllm' or 'sglang'"),
        ("learner.steps=many", "learner.steps: needs a whole number, not a text"),
        ("learner.steps=1.5", "learner.steps: needs a whole number, not one with a fraction"),
        ("reward.timeout_s=[1]", "reward.timeout_s: needs a number, not a list"),
        ("reward.in_process=oui", "reward.in_process: needs true or false, not a text"),
        ("reward.endpoints=grpc://a:1", "reward.endpoints: needs a list in brackets, [VALUE, ...], not a text"),
        ("checkpoint.hf=best", "checkpoint.hf: needs a list in brackets, [VALUE, ...], not a text"),
        ("reward.by_data_source=a", "reward.by_data_source: needs a mapping, {KEY: VALUE}, not a text"),
        ("run.name=[1]", "run.name: needs a text, not a list"),
        ("learner=3", "learner: needs a section, not a number"),
        ("learner.optimizer.lr=.inf", "learner.optimizer.lr: needs a finite number"),
        ("learner.optimizer.lr=-1", "learner.optimizer.lr: needs a number of at least 0"),
        ("learner.optimizer.betas=[0.9,.nan]", "learner.optimizer.betas.1: needs a finite number"),
        ("learner.optimizer.betas=[0.9,1]", "learner.optimizer.betas.1: needs a number below 1"),
        ("learner.optimizer.betas=[0.9]", "missing key learner.optimizer.betas.1"),
        (
            "learner.optimizer.betas=[0,0,0]",
            "learner.optimizer.betas: Tuple should have at most 2 items after validation, not 3",
        ),
        ("eval.stop_at=.nan", "eval.stop_at: needs a finite number"),
        (
            "learner.distributed.timeout_s=1e300",
            "learner.distributed.timeout_s: needs at most 315360000 seconds (ten years)",
        ),
        ("buffer.stall_limit_s=.inf", "buffer.stall_limit_s: needs a finite number"),
    ],
)
def test_a_bad_value_is_one_error_that_says_what_the_key_needs(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(MINIMAL, [override])
    assert caught.value.message == message


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["learner.distributed.nodes=2"], "nodes is more than 1: set rendezvous to HOST:PORT of node 0"),
        (["learner.distributed.rendezvous=a"], "rendezvous 'a' is not host:port"),
        (
            ["learner.distributed={nodes: 2, rendezvous: a:1}", "learner.ranks=3"],
            "ranks: 3 cannot be divided evenly over 2 nodes",
        ),
        (
            ["learner.profile={steps: [3], ranks: [0, 2]}", "learner.ranks=2"],
            "profile.ranks names rank 2, and ranks is",
        ),
    ],
)
def test_ranks_of_several_nodes_have_a_place_to_meet_and_are_as_many_on_each(
    overrides: list[str], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(MINIMAL, overrides)
    assert message in caught.value.message


def test_the_algorithm_section_is_flat() -> None:
    given = {"name": "dapo", "loss": "gspo", "kl": {"where": "loss"}, "horizon": 7}
    config = load_config({**MINIMAL, "algorithm": given}, ["--algorithm.loss.clip_high=0.3", "--algorithm.kl.cap=1"])
    assert config.algorithm.name == "dapo"
    assert config.algorithm.params == {
        "loss": {"name": "gspo", "clip_high": 0.3},
        "kl": {"where": "loss", "cap": 1},
        "horizon": 7,
    }
    assert load_config(config.model_dump(mode="json")) == config, "what is shown can be read again"
    assert load_config({**MINIMAL, "algorithm": "rloo"}).algorithm.params == {}


def test_numbers_with_an_exponent_need_no_point(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("model: {path: m}\ndata: {train: d.parquet}\nalgorithm: {kl: {coefficient: 1e-3, target: -2E+4}}\n")
    config = load_config(path, ["--algorithm.loss.clip_low=3e-4", "--run.name=1e2x"])
    assert config.algorithm.params == {"kl": {"coefficient": 1e-3, "target": -2e4}, "loss": {"clip_low": 3e-4}}
    assert config.run.name == "1e2x"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *(("1.5e6", 1.5e6), (".5e3", 500.0), ("-.5", -0.5), ("+1.e2", 100.0), ("1e6", 1e6), ("1.5e+6", 1.5e6)),
        *(("08", "08"), ("1.5e6x", "1.5e6x"), ("1.2.3", "1.2.3"), ("e5", "e5"), (".", "."), ("7", 7), ("010", 8)),
    ],
)
def test_floats_are_those_of_yaml_1_2_and_texts_like_them_are_quoted(text: str, value: object) -> None:
    for filling in ("", f"\n#{'-' * yaml_text._QUICK}"):
        found = yaml_text.parse(text + filling)
        assert (found, type(found)) == (value, type(value))
    for written in (yaml_text.write([text, value]), yaml_text.in_line([text, value])):
        assert yaml_text.parse(written) == [text, value]


@pytest.mark.parametrize("opening", ["[", "{a: ", "- ", "? ", "-\n"])
@pytest.mark.parametrize("levels", [199, 16_383])
def test_nesting_overflows_no_small_stack(levels: int, opening: str) -> None:
    """512 KiB is what a thread has on macOS; an overflow ends the process."""
    if opening == "-\n":
        levels = min(levels, 2000)
        text = "".join(f"{' ' * level}-\n" for level in range(levels))
    else:
        text = opening * levels

    def parse() -> None:
        with contextlib.suppress(yaml.YAMLError):
            yaml_text.parse(text)

    before = threading.stack_size(512 << 10)
    thread = threading.Thread(target=parse)
    # Garbage of other tests that is collected during the recursion has no room to end in.
    gc.collect()
    gc.disable()
    try:
        thread.start()
        thread.join()
    finally:
        gc.enable()
        threading.stack_size(before)


@pytest.mark.parametrize("opening", ["[", "{a: ", "- "])
def test_what_is_nested_too_deeply_is_refused_however_long_it_is(tmp_path: Path, opening: str) -> None:
    for comment in ("", f"#{'-' * 16_000}\n"):
        path = tmp_path / "deep.yaml"
        path.write_text(comment + opening * 1200)
        with pytest.raises(ConfigError, match=r"not valid YAML|expected a mapping"):
            load_config(path)


def test_folders_of_another_engine_are_refused() -> None:
    run = {"model": {"path": "m"}, "data": {"train": "t"}, "learner": {"engine": "mine"}}
    assert load_config(run).learner.engine == "mine"
    with pytest.raises(ConfigError, match=r"checkpoint\.hf needs learner\.engine: fsdp2 or megatron, got mine"):
        load_config(run, ["checkpoint.hf=[last]"])
    assert load_config(run, ["checkpoint.hf=[last]", "learner.engine=megatron"]).checkpoint.hf


def test_a_learning_rate_of_zero_shows_the_mismatch_alone() -> None:
    assert load_config(MINIMAL, ["--learner.optimizer.lr=0"]).learner.optimizer.lr == 0


def test_roles_have_their_own_model_and_optimizer() -> None:
    config = load_config(
        MINIMAL, ["--learner.roles.critic.optimizer.lr=1e-5", "--learner.roles.reference={path: org/base}"]
    )
    critic, reference = config.learner.roles["critic"], config.learner.roles["reference"]
    assert critic.path is None
    assert critic.optimizer is not None
    assert critic.optimizer.lr == 1e-5
    assert (reference.path, reference.optimizer) == ("org/base", None)


def test_roles_have_their_own_engine_and_division() -> None:
    learner = load_config(
        MINIMAL,
        [
            "learner={engine: megatron, ranks: 8, parallel: {tp: 2, pp: 2, layers: [3, 5]}}",
            "learner.roles.critic.parallel={tp: 4}",
            "learner.roles.reference.engine=fsdp2",
            "learner.roles.teacher={engine: fsdp2, parallel: {sp: 2}}",
            "learner.roles.judge.engine=megatron",
        ],
    ).learner
    assert learner.engines == {"megatron", "fsdp2"}
    assert {role: (learner.engine_of(role), learner.parallel_of(role)) for role in ("actor", *learner.roles)} == {
        "actor": ("megatron", ParallelSection(tp=2, pp=2, layers=(3, 5))),
        "critic": ("megatron", ParallelSection(tp=4)),
        "reference": ("fsdp2", ParallelSection()),
        "teacher": ("fsdp2", ParallelSection(sp=2)),
        "judge": ("megatron", ParallelSection(tp=2, pp=2, layers=(3, 5))),
    }
    assert [learner.parallel_key(role) for role in ("actor", "critic", "judge")] == [
        "learner.parallel",
        "learner.roles.critic.parallel",
        "learner.parallel",
    ]


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("learner.megatron.overlap_param_gather=true", "overlap_param_gather needs overlap_grad_reduce"),
        ("learner.router.load_balance_coeff=-1", "learner.router.load_balance_coeff"),
        ("learner.parallel.layers=[2, 0]", "learner.parallel.layers"),
        ("learner.parallel.tp=0", "learner.parallel.tp"),
    ],
)
def test_divisions_that_no_model_can_have_are_refused(override: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(MINIMAL, [override])
    assert said in caught.value.message


@pytest.mark.parametrize(
    ("engine", "recorded", "said"),
    [
        ("hf", "rollout.hf.routed_experts=true", None),
        ("vllm", "rollout.vllm.routed_experts=true", None),
        ("hf", "rollout.vllm.routed_experts=true", "set rollout.hf.routed_experts to true"),
        ("vllm", "rollout.hf.routed_experts=true", "set rollout.vllm.routed_experts to true"),
        ("sglang", "rollout.hf.routed_experts=true", "which are not taken from sglang"),
    ],
)
def test_experts_are_replayed_where_generators_record_them(engine: str, recorded: str, said: str | None) -> None:
    overrides = [f"rollout.engine={engine}", recorded, "learner.router.replay=true"]
    if said is None:
        assert load_config(MINIMAL, overrides).learner.router.replay
        return
    with pytest.raises(ConfigError) as caught:
        load_config(MINIMAL, overrides)
    assert said in caught.value.message


@pytest.mark.parametrize(("given", "slots"), [([], 64), (["rollout.engine=vllm"], 256), (["rollout.slots=5"], 5)])
def test_engines_made_for_a_gpu_decode_more_sequences_together(given: list[str], slots: int) -> None:
    config = load_config(MINIMAL, given)
    assert config.rollout.slots == slots
    assert Config.model_validate_json(config.model_dump_json()).rollout.slots == slots


def test_the_home_of_a_model_is_that_of_who_starts_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    given = {"model": {"path": "~/m"}, "data": {"train": "t"}, "learner": {"roles": {"critic": {"path": "~/c"}}}}
    config = load_config(given)
    assert (config.model.path, config.learner.roles["critic"].path) == ("/home/someone/m", "/home/someone/c")
    assert load_config(given, ["model.path=org/a~b"]).model.path == "org/a~b"
    with pytest.raises(ConfigError, match=r"model\.path: ~no-such-user/m: "):
        load_config(given, ["model.path=~no-such-user/m"])


def test_missing_sections_and_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"missing key model"):
        load_config({})
    with pytest.raises(ConfigError, match=r"cannot read configuration .*nowhere"):
        load_config(tmp_path / "nowhere.yaml")
    (tmp_path / "list.yaml").write_text("- 1\n")
    with pytest.raises(ConfigError, match=r"expected a mapping"):
        load_config(tmp_path / "list.yaml")


def test_parse_overrides_keeps_equal_signs_in_values() -> None:
    assert parse_overrides(["--a.b=x=y"]) == {"a.b": "x=y"}


def _sections(model: type[Section]) -> list[type[Section]]:
    inner = [section_of(field.annotation) for field in model.model_fields.values()]
    return [model, *(s for i in inner if i is not None for s in _sections(i))]


def test_every_key_is_documented() -> None:
    bare = [f"{s.__name__}.{n}" for s in _sections(Config) for n, f in s.model_fields.items() if not f.description]
    assert bare == []


def test_loading_the_configuration_imports_nothing_heavy() -> None:
    heavy = ("torch", "transformers", "grpc", "numpy")
    code = f"import sys, rollmesh.mesh.config; print([m for m in {heavy} if m in sys.modules])"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=240)
    assert shown.stdout.strip() == "[]"


def test_adapters_are_served_by_engines_that_compute_with_them() -> None:
    given = {"model": {"path": "m"}, "data": {"train": "t"}, "learner": {"lora": {"push": "served"}}}
    with pytest.raises(ConfigError, match=r"rollout\.engine is hf: set learner\.lora\.push=merged"):
        load_config(given, ["rollout.engine=hf"])
    for engine in ("vllm", "sglang"):
        served = load_config(given, [f"rollout.engine={engine}"]).learner
        assert served.served_adapter is served.pushed_adapter is served.lora
    merged = load_config(given, ["learner.lora.push=merged"]).learner
    assert (merged.served_adapter, merged.pushed_adapter) == (None, merged.lora)
    assert load_config(given, ["learner.lora.push=full"]).learner.pushed_adapter is None
