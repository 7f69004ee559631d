"""The answer to a change of each key at a continuation: the page says what a start says, and that is so."""

from __future__ import annotations

import string
from pathlib import Path

from examples.chats import chat_tokenizer
from rollmesh.launcher.preflight.former_groups import is_queued
from rollmesh.launcher.preflight.key_changes import RUN, TriedRun, with_reference
from rollmesh.learner.coordinator.prompt_sources import open_prompts
from rollmesh.mesh.config.docs_reference import keys_of
from rollmesh.mesh.config.models import Config
from rollmesh.mesh.errors import ConfigError, DataError

PAGE = Path(__file__).parents[2] / "docs" / "continuing.md"


def test_the_page_is_that_of_the_present_keys_and_answers() -> None:
    assert with_reference(PAGE.read_text()) == PAGE.read_text(), "`make docs` writes it"


def test_a_key_that_changes_a_queued_prompt_is_one_of_which_the_step_is_told(tmp_path: Path) -> None:
    run, tokenizer = TriedRun(RUN, tmp_path / "run"), chat_tokenizer(string.ascii_letters + string.digits + " .")
    changing = set()
    for key, kind, *_ in keys_of(Config, ""):
        if not key.startswith(("data.", "rollout.", "run.", "eval.")) or (pair := run.pair(key, kind)) is None:
            continue
        try:
            before, now = (open_prompts(config, tokenizer, greedy=0)[0].after(0, 8).tasks for config in pair)
        except (ConfigError, DataError):
            continue
        if before != now:
            changing.add(key)
            assert is_queued(key.replace(".N.", ".0.")), key
    assert {
        "run.seed",
        "data.shuffle",
        "rollout.n",
        "rollout.max_response_tokens",
        "data.train.N.sampling.n",
    } < changing
