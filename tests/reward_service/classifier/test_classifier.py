"""The classifier as a scorer: one process, batches over all callers, replaced when it ends or hangs."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from rollmesh.mesh.access.code_permissions import requested_code
from rollmesh.mesh.config import load_config
from rollmesh.mesh.config.reward import RewardSection
from rollmesh.mesh.errors import RewardError
from rollmesh.reward_service.classifier.classifier import Classifier
from rollmesh.reward_service.composition.part import Part
from rollmesh.reward_service.configured import with_configured
from rollmesh.reward_service.outcomes import Failed, Outcome, RewardItem, Scored
from tests.reward_service.tiny_models import CHAT_TEMPLATE, CONTEXT, write_model

# Nothing takes as long unless it hangs.
LONG_S = 240.0


@pytest.fixture(scope="module", autouse=True)
def _forked_workers() -> None:
    """The model's process is executed, as by the service."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("classifier") / "model", chat_template=CHAT_TEMPLATE)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def scorer(folder: Path) -> AsyncIterator[Classifier]:
    """`model:FOLDER` as the service builds it, for all tests of this file."""
    section = RewardSection.model_validate({"functions": [f"model:{folder}"], "scorer_timeout_s": LONG_S})
    (entry,), _ = with_configured(section, section.functions, {})
    built = Part.of(entry).use
    assert isinstance(built, Classifier)
    await built.rollmesh_service.start()
    yield built
    await built.rollmesh_service.close()


async def ask(scorer: Classifier, *responses: str) -> list[Outcome]:
    items = [RewardItem(response, "g", "s", "1+1=", response) for response in responses]
    return list(await asyncio.gather(*map(scorer, items)))


def expected(folder: Path, text: str) -> float:
    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    with torch.inference_mode():
        return float(model(torch.tensor([tokenizer.encode(text)])).logits.item())


def totals(outcomes: list[Outcome]) -> list[float]:
    return [outcome.total for outcome in outcomes if isinstance(outcome, Scored)]


@pytest.mark.asyncio(loop_scope="module")
async def test_groups_of_many_callers_are_scored_as_each_text_alone(scorer: Classifier, folder: Path) -> None:
    responses = ["2", "222", "22", "2" * 12, "7"]
    async with asyncio.timeout(LONG_S):
        groups = await asyncio.gather(ask(scorer, *responses), ask(scorer, *reversed(responses)))
        alone = [await ask(scorer, text) for text in responses]
    scores = [expected(folder, f"1+1={text}<end>") for text in responses]
    assert len(set(scores)) == len(scores)
    for found in (totals(groups[0]), totals(groups[1])[::-1], [totals(each)[0] for each in alone]):
        assert found == pytest.approx(scores, abs=1e-5)


@pytest.mark.asyncio(loop_scope="module")
async def test_a_text_that_is_too_long_fails_alone(scorer: Classifier) -> None:
    async with asyncio.timeout(LONG_S):
        short, long = await ask(scorer, "2", "2" * CONTEXT)
    assert isinstance(short, Scored)
    assert isinstance(long, Failed)
    assert (long.code, long.retryable) == ("too_long", False)
    assert f"knows {CONTEXT}" in long.message


def test_neither_torch_nor_transformers_is_needed_where_it_is_asked(folder: Path) -> None:
    program = (
        "import sys; from rollmesh.mesh.config.reward import RewardSection; "
        "from rollmesh.reward_service.configured import with_configured; "
        f"with_configured(RewardSection(functions=['model:{folder}']), ['model:{folder}'], {{}}); "
        "assert not {'torch', 'transformers'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(__file__).parents[3], timeout=LONG_S)


def test_what_cannot_be_asked_is_refused_before_it_is_loaded(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(RewardError, match="does not exist"):
        with_configured(RewardSection(), [f"model:{tmp_path}"], {})
    with pytest.raises(ValueError, match=r"needs reward\.classifier\.model"):
        RewardSection(functions=["classifier"])
    for wrong in ({"url": "http://a"}, {"engine": "vllm", "url": "http://a", "python": "p"}, {"api_key_file": "k"}):
        with pytest.raises(ValueError, match=r"started here|for the engines|of its own"):
            RewardSection.model_validate({"classifier": wrong})
    given = {"model": {"path": "m"}, "data": {"train": "t"}, "reward": {"functions": [f"model:{folder}"]}}
    given["reward"]["in_process"] = True
    assert [asked.name for asked in requested_code(load_config(given))] == [f"model:{folder}"]
