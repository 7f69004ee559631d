"""Code that a configuration asks a generator to execute, and the decision about it."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from rollmesh.mesh.access.code_permissions import AllowCode, CodeRule, check_code, requested_code, rule_of
from rollmesh.mesh.config import Config
from rollmesh.mesh.errors import ConfigError
from rollmesh.mesh.rpc.failover_channel import is_local

NOTHING = CodeRule(AllowCode.NONE)


def configured(**sections: Any) -> Config:
    given = {"model": {"path": "model"}, "data": {"train": "data.jsonl"}, **sections}
    return Config.model_validate(given)


def asked(**sections: Any) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for each in requested_code(configured(**sections)):
        found.setdefault(each.key, []).append(each.name)
    return found


def engine(name: str, options: dict[str, Any]) -> dict[str, list[str]]:
    return asked(rollout={"engine": name, name: {"options": options}})


def test_a_plain_configuration_asks_for_nothing() -> None:
    assert not requested_code(configured())
    check_code(configured(reward={"in_process": True, "functions": ["gsm8k", "math"]}), NOTHING)


@pytest.mark.parametrize(
    ("agent", "names"),
    [
        ({"program": "agent.py:run"}, {"rollout.agent.program": ["agent.py:run"]}),
        ({"environment": "games:Chess"}, {"rollout.agent.environment": ["games:Chess"]}),
        ({"tools": ["a:b", "c.py:d"]}, {"rollout.agent.tools": ["a:b", "c.py:d"]}),
        (
            {"command": ["sh", "-c", "id > /tmp/x"], "pass_env": ["HF_TOKEN"]},
            {"rollout.agent.command": ["sh -c 'id > /tmp/x'"], "rollout.agent.pass_env": ["HF_TOKEN"]},
        ),
    ],
)
def test_agents_are_code(agent: dict[str, Any], names: dict[str, list[str]]) -> None:
    assert asked(rollout={"agent": agent}) == names


def test_reward_functions_are_code_where_generators_score() -> None:
    reward = {
        "functions": ["auto", "regex:a|b", "json_schema:a.json", "score.py:check"],
        "by_data_source": {"web": ["grpc://judge:1", "judges:mine"], "sums": ["gsm8k"]},
    }
    assert asked(reward=reward) == {}
    assert asked(reward={**reward, "in_process": True}) == {
        "reward.functions": ["json_schema:a.json", "score.py:check"],
        "reward.by_data_source": ["judges:mine"],
    }


def test_servers_of_reward_models_are_asked_for_where_they_would_be_started() -> None:
    started = {"engine": "vllm", "python": "/opt/bin/python", "options": {"trust_remote_code": True, "block_size": 16}}
    sent = {"engine": "vllm", "url": "http://there:1", "api_key_file": "/root/.cache/token"}
    reward = {"classifier": started, "process": sent}
    assert asked(reward=reward) == {}
    assert asked(reward={**reward, "in_process": True}) == {
        "reward.classifier.python": ["/opt/bin/python"],
        "reward.classifier.options": ["trust_remote_code=true"],
        "reward.process.api_key_file": ["/root/.cache/token"],
    }


def test_files_of_scorers_are_asked_for_where_generators_score() -> None:
    reward = {
        "judge": {
            "base_url": "http://there:1/v1",
            "model": "m",
            "api_key_file": "/root/key",
            "evidence_file": "/e",
        },
        "cache": {"redis": "redis://there:1/0", "redis_password_file": "/root/pass"},
        "isolation": {"plugin": "bubblewrap", "program": "/tmp/run", "toolchains": ["/opt/go"]},
        "late": {"store": "/root/late"},
    }
    assert asked(reward=reward) == {}
    assert asked(reward={**reward, "in_process": True}) == {
        "reward.judge.api_key_file": ["/root/key"],
        "reward.judge.evidence_file": ["/e"],
        "reward.cache.redis_password_file": ["/root/pass"],
        "reward.isolation.program": ["/tmp/run"],
        "reward.isolation.toolchains": ["/opt/go"],
        "reward.late.store": ["/root/late"],
    }


def test_files_of_the_host_that_are_sent_away_are_asked_for() -> None:
    reward = {"endpoints": ["grpc://judge:1"], "key_files": {"grpc://judge:1": "/root/.cache/token"}}
    assert asked(reward=reward) == {"reward.key_files": ["/root/.cache/token"]}
    server = {"address": "http://there:1", "key_file": "/root/.cache/token"}
    assert asked(rollout={"engine": "sglang", "sglang": server}) == {"rollout.sglang.key_file": ["/root/.cache/token"]}


def test_interpreters_and_engine_arguments_count_for_the_engine_that_runs() -> None:
    both = {
        "vllm": {"options": {"worker_cls": "mine.Worker"}},
        "sglang": {"python": "/opt/bin/python", "options": {"trust_remote_code": True}},
    }
    assert asked(rollout={"engine": "hf", **both}) == {}
    assert asked(rollout={"engine": "vllm", **both}) == {"rollout.vllm.options": ['worker_cls="mine.Worker"']}
    assert asked(rollout={"engine": "sglang", **both}) == {
        "rollout.sglang.python": ["/opt/bin/python"],
        "rollout.sglang.options": ["trust_remote_code=true"],
    }


def test_numbers_switches_and_known_words_of_engines_are_no_code() -> None:
    plain = {"block_size": 16, "cpu_offload_gb": 0.5, "enable_dbo": True, "cudagraph_capture_sizes": [1, 2, 4]}
    assert engine("vllm", {**plain, "kv_cache_dtype": "fp8", "trust_remote_code": False}) == {}
    assert engine("sglang", {"chunked_prefill_size": 512, "attention-backend": "triton"}) == {}


@pytest.mark.parametrize("name", ["vllm", "sglang"])
@pytest.mark.parametrize(
    "option",
    [
        {"trust_remote_code": True},
        {"--trust-remote-code": True},
        {"trust_remote_code": "true"},
        {"enable_custom_logit_processor": True},
        {"scheduler_cls": "mine.Scheduler"},
        {"reasoning_parser_plugin": "/tmp/parser.py"},
        {"compilation_config": {"backend": "mine.compile"}},
        {"log_config_file": "/tmp/log.json"},
        {"tokenizer_path": "somebody/else"},
        {"of_a_later_release": "mine.Class"},
        # A word of few where the argument takes one, and a structure all the same.
        {"kv_cache_dtype": {"class": "mine"}},
        # Entries that are no word: an argument of its own, a class, a file.
        {"attention_backend": "--trust-remote-code"},
        {"attention_backend": "mine.Backend"},
        {"kv_cache_dtype": "/tmp/kind"},
        {"kv_cache_dtype": "fp8\n"},
        # A server takes the beginning of a name for the name.
        {"trust-remote-cod": True},
        {"--trust-r": True},
        {"enable_custom_logit_p": True},
        {"cudagraph_capture_sizes": [1, "--trust-remote-code"]},
    ],
)
def test_arguments_that_may_name_code_are_code(name: str, option: dict[str, Any]) -> None:
    (found,) = engine(name, option)[f"rollout.{name}.options"]
    assert found.startswith(next(iter(option)).lstrip("-").replace("-", "_") + "=")


@pytest.mark.parametrize("name", ["vllm", "sglang"])
@pytest.mark.parametrize(
    "written",
    [
        *("tokenizer-path=/tmp/x", "trust-remote-code=1", "trust-remote-code ", " trust-remote-code", "a b", "a.b"),
        *("", "--", "-t", "---trust-remote-code", "1a", "_a", "block_size\n", "\u0131d", "@/tmp/arguments", "/tmp/x"),
    ],
)
def test_a_name_that_is_none_of_an_argument_is_refused(name: str, written: str) -> None:
    """A command line would take it for a name and a value, or for something else."""
    with pytest.raises(ValidationError, match="is no name of an engine argument"):
        engine(name, {written: True})


_NAMES = st.sampled_from(["a.py:f", "m:f", "python", "x=1"])


@given(st.lists(_NAMES), st.sampled_from(AllowCode), st.frozensets(_NAMES))
def test_the_rule_alone_decides(tools: list[str], allow: AllowCode, listed: frozenset[str]) -> None:
    config = configured(rollout={"agent": {"tools": tools}})
    refused = [] if allow is AllowCode.ANY else set(tools) - (listed if allow is AllowCode.LISTED else set())
    if not refused:
        check_code(config, CodeRule(allow, listed))
        return
    with pytest.raises(ConfigError) as error:
        check_code(config, CodeRule(allow, listed))
    assert all(f"rollout.agent.tools: {name}" in error.value.message for name in refused)


def test_a_refusal_says_how_to_allow_it() -> None:
    config = configured(rollout={"agent": {"command": ["sh", "-c", "id"]}})
    with pytest.raises(ConfigError) as error:
        check_code(config, NOTHING)
    assert "--allow-code listed --code 'sh -c id'" in error.value.hint
    check_code(config, CodeRule(AllowCode.LISTED, frozenset({"sh -c id"})))


def test_the_rule_of_a_command_line() -> None:
    assert rule_of(None, [], is_local=True).allow is AllowCode.ANY
    assert rule_of(None, [], is_local=False).allow is AllowCode.NONE
    assert rule_of(AllowCode.ANY, [], is_local=False).allow is AllowCode.ANY
    for here in (True, False):
        assert rule_of(None, ["a:f"], is_local=here) == CodeRule(AllowCode.LISTED, frozenset({"a:f"}))
    with pytest.raises(ConfigError, match=re.escape("--code 'a:f' has no effect with --allow-code any")):
        rule_of(AllowCode.ANY, ["a:f"], is_local=True)


def test_a_mesh_is_local_where_all_its_fronts_are() -> None:
    assert is_local("127.0.0.1:7000,localhost:7001,[::1]:7002")
    assert not is_local("127.0.0.1:7000,node-1:7000")
    assert not is_local("0.0.0.0:7000")
