"""Graders of other projects, run by an interpreter that has them: JSON lines in, JSON lines out.

`python peer_graders.py` prints one line with the graders that can be imported, by name with their version, or the
reason against each. Then it reads lines `{"grader": ..., "response": ..., "truth": ..., "extra": ...}` and answers each
with `{"score": number}` or `{"error": text}`. It imports nothing of Rollmesh.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import sys
import types
from collections.abc import Callable
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

Grader = Callable[[str, str, dict[str, Any]], float]


def _verl_files() -> None:
    """Makes verl's modules importable without the package's own imports (Ray), which graders do not need."""
    if "verl" in sys.modules:
        return
    spec = find_spec("verl")
    if spec is None or spec.origin is None:
        raise ImportError("verl is not installed")
    for name, folder in (("verl", ""), ("verl.utils", "utils")):
        module = types.ModuleType(name)
        module.__path__ = [str(Path(spec.origin).parent / folder)]
        sys.modules[name] = module


def _verl(module: str, function: str = "compute_score", **options: Any) -> Grader:
    _verl_files()
    grade = getattr(import_module(f"verl.utils.reward_score.{module}"), function)

    def graded(response: str, truth: str, _extra: dict[str, Any]) -> float:
        answer = grade(response, truth, **options)
        return float(
            answer["score"] if isinstance(answer, dict) else answer[0] if isinstance(answer, tuple) else answer
        )

    return graded


def _verl_math_verify() -> Grader:
    _verl_files()
    # Its process pool runs this; here the process is this one.
    grade = import_module("verl.utils.reward_score.math_verify")._verify_in_subprocess
    return lambda response, truth, _extra: float(grade(f"\\boxed{{{truth}}}", response))


def _verl_qa() -> Grader:
    grade = _verl("search_r1_like_qa_em")
    return lambda response, truth, extra: grade(response, {"target": [truth]}, extra)  # type: ignore[arg-type]


def _math_verify() -> Grader:
    package = import_module("math_verify")

    def graded(response: str, truth: str, _extra: dict[str, Any]) -> float:
        return float(package.verify(package.parse(f"\\boxed{{{truth}}}"), package.parse(response)))

    return graded


def _trl() -> Grader:
    reward = import_module("trl.rewards.accuracy_rewards").accuracy_reward

    def graded(response: str, truth: str, _extra: dict[str, Any]) -> float:
        (found,) = reward([[{"role": "assistant", "content": response}]], [f"\\boxed{{{truth}}}"])
        if found is None:
            raise ValueError("unscorable")
        return float(found)

    return graded


def _mcqa() -> Grader:
    app = import_module("resources_servers.mcqa.app")
    client = MagicMock(spec=import_module("nemo_gym.server_utils").ServerClient)
    settings = app.MCQAResourcesServerConfig(host="127.0.0.1", port=1, entrypoint="", name="mcqa")
    server = app.MCQAResourcesServer(config=settings, server_client=client)
    loop = asyncio.new_event_loop()

    def graded(response: str, truth: str, extra: dict[str, Any]) -> float:
        text = {"type": "output_text", "text": response, "annotations": []}
        message = {"id": "m", "type": "message", "role": "assistant", "status": "completed", "content": [text]}
        request = app.MCQAVerifyRequest(
            responses_create_params={"input": [{"role": "user", "content": "Which?"}]},
            response={
                "id": "r",
                "created_at": 0,
                "model": "m",
                "object": "response",
                "output": [message],
                "parallel_tool_calls": True,
                "tool_choice": "auto",
                "tools": [],
            },
            expected_answer=truth,
            grading_mode="lenient_boxed",
            options=extra["options"],
        )
        return float(loop.run_until_complete(server.verify(request)).reward)

    return graded


_PARSERS = ("math-verify", "latex2sympy2-extended", "antlr4-python3-runtime")
# By name: the packages that decide, and how the grader is made.
_MADE: dict[str, tuple[tuple[str, ...], Callable[[], Grader]]] = {
    "verl gsm8k": (("verl",), lambda: _verl("gsm8k")),
    "verl gsm8k flexible": (("verl",), lambda: _verl("gsm8k", method="flexible")),
    "verl math_reward": (("verl",), lambda: _verl("math_reward")),
    "verl math_dapo": (("verl",), lambda: _verl("math_dapo")),
    "verl math_verify": (("verl", *_PARSERS), _verl_math_verify),
    "verl prime_math": (("verl", "sympy"), lambda: _verl("prime_math")),
    "verl qa": (("verl",), _verl_qa),
    "math-verify": (_PARSERS, _math_verify),
    "TRL accuracy": (("trl", *_PARSERS), _trl),
    "NeMo Gym mcqa": (("nemo-gym",), _mcqa),
}


def main() -> None:
    """Answers until the input ends."""
    answers = sys.stdout
    graders: dict[str, Grader] = {}
    known: dict[str, dict[str, str]] = {}
    # Graders print.
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        for name, (packages, make) in _MADE.items():
            try:
                graders[name] = make()
                known[name] = {"version": ", ".join(f"{each} {metadata.version(each)}" for each in packages)}
            except Exception as error:  # noqa: BLE001 - whatever a package raises on import is the reason
                known[name] = {"missing": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(known) + "\n")
        answers.flush()
        for line in sys.stdin:
            asked = json.loads(line)
            try:
                answer: dict[str, Any] = {
                    "score": graders[asked["grader"]](asked["response"], asked["truth"], asked["extra"])
                }
            except Exception as error:  # noqa: BLE001 - a grader that raises is a result here
                answer = {"error": f"{type(error).__name__}: {error}"}
            printed.seek(0)
            printed.truncate()
            answers.write(json.dumps(answer) + "\n")
            answers.flush()


if __name__ == "__main__":
    main()
