"""A server that the model's process starts: its key; replaced when it dies or hangs, ends with its owner."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from rollmesh.mesh.config.reward import RewardSection
from rollmesh.reward_service.classifier.classifier import Classifier
from rollmesh.reward_service.configured import BUILDERS
from rollmesh.reward_service.outcomes import RewardItem, Scored
from rollmesh.reward_service.served_model.messages import ModelOptions
from rollmesh.reward_service.served_model.model import ServedModel
from rollmesh.reward_service.served_model.server import command_of
from tests import engines_here
from tests.reward_service.served_model.conftest import Clock
from tests.reward_service.tiny_models import write_model

# Nothing takes as long unless it hangs.
LONG_S = 240.0


def members(group: int) -> dict[int, str]:
    """Processes of a process group that live, with their command lines."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, _, owner = (folder / "stat").read_text().rpartition(")")[2].split()[:3]
            if int(owner) == group and state != "Z":
                found[int(folder.name)] = (folder / "cmdline").read_text()
        except OSError:
            continue
    return found


async def until_without(group: int) -> None:
    while members(group):
        await asyncio.sleep(0.05)


async def until_scored(scorer: Classifier, response: str) -> float:
    """Asks again what was not begun, as callers do."""
    while not isinstance(outcome := await scorer(RewardItem(response, "g", "s", "1+1=", response)), Scored):
        await asyncio.sleep(0.05)
    return outcome.total


def test_options_go_before_everything_else_and_no_key_is_in_a_command_line() -> None:
    options = ModelOptions("response", "/m", "vllm", device="cuda:1", server_options={"dtype": "half", "a_b": True})
    line = command_of(options, 7, None)
    assert line[3:5] == ["--model", "/m"]
    assert {"--dtype=half", "--a-b", "--runner=pooling", "--port=7", "--host=127.0.0.1"} <= set(line)
    options = ModelOptions("response", "/m", "sglang", python="/p", device="cuda:1")
    line = command_of(options, 7, Path("/k"))
    assert line[:5] == ["/p", "-m", "sglang.launch_server", "--model-path", "/m"]
    assert {"--is-embedding", "--device=cuda", "--base-gpu-id=1", "--config=/k"} <= set(line)


# Stands for vLLM: an interpreter that is a server. The reward is the number of tokens. A file says how it breaks, once.
FAKE = """#!{python}
import json, os, pathlib, sys, threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

port = int(next(each for each in sys.argv if each.startswith("--port=")).partition("=")[2])
broken = pathlib.Path("{broken}")


class Answers(BaseHTTPRequestHandler):
    def do_GET(self):
        self.say({{"data": [{{"max_model_len": 24}}]}})

    def do_POST(self):
        ids = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["input"]
        assert self.headers["Authorization"] == "Bearer " + os.environ["VLLM_API_KEY"]
        if broken.exists():
            how = broken.read_text()
            broken.unlink()
            os._exit(3) if how == "dies" else threading.Event().wait()
        self.say({{"data": [{{"index": index, "probs": [len(row)]}} for index, row in enumerate(ids)]}})

    def say(self, value):
        content = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


os.fork() or threading.Event().wait()
ThreadingHTTPServer(("127.0.0.1", port), Answers).serve_forever()
"""


def scorer_of(folder: Path, python: Path, *, timeout_s: float = LONG_S, **options: object) -> Classifier:
    given = {"engine": "vllm", "python": str(python), "device": "cpu", "model": str(folder), "template": "text"}
    section = RewardSection.model_validate(
        {"functions": ["classifier"], "classifier": {**given, **options}, "scorer_timeout_s": timeout_s}
    )
    scorer = BUILDERS["classifier"](section)
    assert isinstance(scorer, Classifier)
    return scorer


async def check_end(scorer: Classifier) -> None:
    """Kills the model's process alone, as the kernel does when the service dies; its server ends with it."""
    group = scorer.rollmesh_service.pid
    assert group is not None
    assert len(members(group)) > 1
    os.kill(group, signal.SIGKILL)
    await until_without(group)


async def silent_too_long(model: ServedModel, clock: Clock, broken: Path) -> None:
    """Lets the process be silent for too long whose server takes the file away, and hangs."""
    while broken.exists() or model._computing_since is None:
        await asyncio.sleep(0.01)
    clock.advance(0.5 * LONG_S)


async def test_a_server_is_replaced_when_it_dies_or_hangs_and_ends_with_its_owner(tmp_path: Path, clock: Clock) -> None:
    folder, python, broken = write_model(tmp_path / "model"), tmp_path / "python", tmp_path / "broken"
    python.write_text(FAKE.format(python=sys.executable, broken=broken))
    python.chmod(0o755)
    scorer = scorer_of(folder, python)
    restarts = 0
    try:
        async with asyncio.timeout(LONG_S):
            await scorer.rollmesh_service.start()
            assert await until_scored(scorer, "2") == 6
            for how in ("dies", "hangs"):
                broken.write_text(how)
                scored = asyncio.create_task(until_scored(scorer, "22"))
                if how == "hangs":
                    await silent_too_long(scorer.rollmesh_service, clock, broken)
                assert await scored == 7
                restarts += 1
                assert scorer.rollmesh_service.restarts == restarts
            await check_end(scorer)
    finally:
        await scorer.rollmesh_service.close()


# With a server that stands for vLLM: above.
@pytest.mark.exhaustive
async def test_vllm_is_started_scores_as_transformers_and_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engines_here.require("vllm")
    for name, value in {"VLLM_CPU_KVCACHE_SPACE": "1", "TORCHDYNAMO_DISABLE": "1"}.items():
        monkeypatch.setenv(name, value)
    folder = write_model(tmp_path / "model", head_dim=32)
    scorer = scorer_of(folder, engines_here.python("vllm"), dtype="float32", options={"enforce_eager": True})
    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    with torch.inference_mode():
        expected = float(model(torch.tensor([tokenizer.encode("1+1=2<end>")])).logits.item())
    try:
        async with asyncio.timeout(2 * LONG_S):
            await scorer.rollmesh_service.start()
            assert await until_scored(scorer, "2") == pytest.approx(expected, abs=1e-4)
            await check_end(scorer)
    finally:
        await scorer.rollmesh_service.close()
