"""`rollmesh generate` around its services, which a script stands in for: what it asks, prints and keeps."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from rollmesh.evaluation.generate import GenerationRequest, generate
from rollmesh.evaluation.local import LocalEvaluation
from rollmesh.launcher.console.view import SilentView
from rollmesh.learner.standalone.response_file import RESPONSES, ResponseFile
from rollmesh.mesh.errors import DataError
from tests.learner.trainers.tiny import write_chat_model

_SHORT = ["rollout.max_prompt_tokens=32", "rollout.max_response_tokens=32"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("models") / "m")


def answering(folder: Path, text: str) -> Callable[[LocalEvaluation], None]:
    """Services that give this response to the first prompt."""

    def execute(_launch: LocalEvaluation) -> None:
        response = {"text": text, "reward": None, "reason": "", "tokens": 1, "finish": "stop"}
        with ResponseFile(folder / RESPONSES) as file:
            file.append([{"row": 0, "prompt": "hi", "responses": [response]}])

    return execute


def ask(out: Path, model: Path, text: str, texts: Sequence[str] = ("hi",), **settings: Any) -> list[str]:
    request = GenerationRequest(None, _SHORT, str(model), out, **settings)
    found = map(json.loads, generate(request, texts, None, SilentView(), answering(out, text)))
    return [response["text"] for record in found for response in record["responses"]]


def test_responses_are_kept_until_they_are_asked_afresh(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert ask(out, model, "one") == ["one"]
    assert ask(out, model, "two") == ["one"], "it continues, and nothing is left to ask"
    assert ask(out, model, "two", fresh=True) == ["two"]
    (aside,) = tmp_path.glob("out.*")
    assert "one" in (aside / RESPONSES).read_text()


@pytest.mark.parametrize("wrong", [{"model": Path("none")}, {"texts": ()}])
def test_what_is_refused_changes_nothing(model: Path, tmp_path: Path, wrong: dict[str, Any]) -> None:
    out = tmp_path / "out"
    ask(out, model, "one")
    with pytest.raises(DataError):
        ask(out, **{"model": model, "text": "two", "fresh": True, **wrong})
    assert ask(out, model, "two") == ["one"]
    assert not list(tmp_path.glob("out.*"))
