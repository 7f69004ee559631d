"""Docstrings and comments keep the rules of CONTRIBUTING: short, plain sentences that do not begin as questions."""

from __future__ import annotations

import re

import pytest

from tests.docs.prose import LONGEST_SENTENCE, TRANSLATED, blocks, sentences, words
from tests.repository import REPOSITORY

PACKAGES = (
    "benchmarks",
    "buffer",
    "deploy",
    "examples",
    "generators",
    "learner",
    "mesh",
    "protos",
    "reward_service",
    "rollmesh",
    "tests",
)
SUFFIXES = (".py", ".lua", ".proto")
QUESTIONS = re.compile(r"(What|Who|Whoever|Of|How|Why|Which)\b")


@pytest.mark.parametrize("package", PACKAGES)
def test_sentences_are_short_plain_and_begin_with_no_question(package: str) -> None:
    written = [
        path for path in (REPOSITORY / package).rglob("*") if path.suffix in SUFFIXES and "_pb2" not in path.name
    ]
    assert written
    assert not [
        f"{path.relative_to(REPOSITORY)}:{block.line}: {sentence}"
        for path in written
        for block in blocks(path)
        for sentence in sentences(block.text)
        if words(sentence) > LONGEST_SENTENCE or QUESTIONS.match(sentence) or TRANSLATED.search(sentence)
    ]
