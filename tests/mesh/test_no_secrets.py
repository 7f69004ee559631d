"""No secret gets into a configuration, by whatever key or form; and what only sounds like one does."""

from __future__ import annotations

import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

import pytest
import yaml

from rollmesh.mesh.config import load_config
from rollmesh.mesh.config.models import Config
from rollmesh.mesh.errors import ConfigError
from tests.mesh.test_config import MINIMAL

SECRET = "hunter2-b3"


def refused(values: dict[str, Any], *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(values, overrides)
    shown = "".join(traceback.format_exception(caught.value))
    assert SECRET not in shown, "neither the message nor what a traceback shows repeats a secret"
    return str(caught.value)


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("buffer.redis=redis://:{}@host:1/0", "buffer.redis_password_file"),
        ("rollout.vllm.options.hf_token={}", "rollout.vllm.options.hf_token"),
        ("rollout.vllm.options={{override: {{auth: {{apiKey: {}}}}}}}", "rollout.vllm.options.override.auth.apiKey"),
        ("rollout.sglang.options={{--api-key: {}}}", "rollout.sglang.options.--api-key"),
        ("rollout.sglang.options.ssl_keyfile_password={}", "rollout.sglang.options.ssl_keyfile_password"),
        ("rollout.sglang.address=http://user:{}@host:1", "rollout.sglang.address"),
        ("rollout.agent.command=[agent, --api-key={}]", "rollout.agent.pass_env"),
        ("rollout.agent.command=[agent, --api-key, {}]", "rollout.agent.pass_env"),
        ("rollout.agent.command=[sh, -c, 'OPENAI_API_KEY={} agent']", "rollout.agent.pass_env"),
        ("data.chat_template_kwargs.password={}", "data.chat_template_kwargs.password"),
        ("algorithm.judge={{client_secret: {}}}", "algorithm.judge.client_secret"),
        ("algorithm.judge=https://host/score?access_token={}", "algorithm.judge"),
        ("model.path=https://{}@host/model", "model.path"),
        ("reward.endpoints=['grpc://{}@host:1']", "reward.endpoints"),
        ("reward.by_data_source={{math: ['grpc://me:{}@host:1']}}", "reward.by_data_source.math"),
        ("reward.key_files={{'grpc://me:{}@host:1': key}}", "reward.key_files"),
    ],
)
def test_what_holds_a_secret_is_refused_by_name(override: str, key: str) -> None:
    assert key in refused(MINIMAL, override.format(SECRET))


def test_a_secret_in_a_wrong_place_is_not_repeated(tmp_path: Path) -> None:
    assert "buffer.redis_pasword" in refused(MINIMAL, f"buffer.redis_pasword={SECRET}")
    assert "learner.steps" in refused(MINIMAL, f"learner.steps={SECRET}")
    assert "override rollout.vllm.options" in refused(MINIMAL, f"rollout.vllm.options={{hf_token: {SECRET}")
    path = tmp_path / "c.yaml"
    path.write_text(f"rollout: {{vllm: {{options: {{hf_token: {SECRET}]\n")
    with pytest.raises(ConfigError, match=r"not valid YAML: .*row 1") as caught:
        load_config(path)
    assert SECRET not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize(
    "override",
    [
        "rollout.vllm.options={hf_token: true, max_num_batched_tokens: 8192, long_prefill_token_threshold: 4}",
        "rollout.vllm.options={tokenizer_mode: slow, api_key: null, ssl_keyfile: /k, chat_template: 'https://a/b?c=d'}",
        "rollout.sglang.options={api-key-file: /k, credentials_path: /c, image_token: <image>, mask_token: '[MASK]'}",
        "algorithm={name: grpo, aggregation: token_mean, cost_per_token: 0.1, eos_token: 2, weight_by_token: mean}",
        "rollout.agent={command: [agent, --token-file=/k, --api-key-env, KEY, --tokens=4], pass_env: [API_KEY]}",
        "rollout.stop=['password=', '@']",
        "reward={endpoints: ['grpc://a:1'], key_files: {'grpc://a:1': /secret/token}}",
        "buffer={redis: 'redis://user@a', redis_password_file: /p}",
    ],
)
def test_what_only_sounds_like_a_secret_is_taken(override: str) -> None:
    config = load_config(MINIMAL, [override])
    assert Config.model_validate_json(config.model_dump_json()) == config


def test_a_command_refuses_a_secret_before_it_writes_anything(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(MINIMAL))
    command = ("run", "c.yaml", f"--buffer.redis=redis://:{SECRET}@127.0.0.1:1/0")
    done = subprocess.run(
        [sys.executable, "-m", "rollmesh.cli", *command], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "buffer.redis_password_file" in done.stderr
    assert SECRET not in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["c.yaml"]
