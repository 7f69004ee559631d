"""Odd model folders: each is taken, taken with a word about what is left out, or refused with a remedy that works."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.folders import changes
from benchmarks.folders.answers import COMMANDS
from benchmarks.folders.odd import ODD, REFUSED, TAKEN, TOLD, make_odd
from benchmarks.folders.plain import write_plain
from rollmesh.learner.examination.folder import READ_S, examine
from rollmesh.learner.folder_facts.given_path import is_folder
from rollmesh.learner.model_files.full_weights import read_full
from rollmesh.learner.model_files.stored_model import StoredModel
from rollmesh.mesh.errors import DataError
from tests.repository import REPOSITORY


def ask(path: Path) -> tuple[str, str]:
    """The answer of the examination, and what it says."""
    try:
        assert is_folder(str(path), "model.path")
        notices = examine(path, "model.path", read_s=READ_S)
    except DataError as error:
        assert error.hint
        return REFUSED, str(error)
    return TOLD if notices else TAKEN, " ".join(notices)


def test_the_page_tells_one_answer_of_all_commands() -> None:
    page = (REPOSITORY / "docs" / "model-folders.md").read_text(encoding="utf-8")
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ")][2:]
    found = {about: set(answers[: len(COMMANDS)]) for about, *answers in rows}
    expected = {odd.about: {odd.answer} for odd in ODD.values()}
    assert found
    assert all(expected[about] == answers for about, answers in found.items())


@pytest.mark.parametrize("name", ODD)
def test_each_odd_folder_has_its_answer_and_its_remedy_works(name: str, tmp_path: Path) -> None:
    odd, path = ODD[name], make_odd(name, tmp_path)
    answer, words = ask(path)
    assert (answer, odd.words in words) == (odd.answer, True), words
    if odd.remedy is not None:
        assert ask(odd.remedy(path) or path)[0] != REFUSED


def test_what_is_not_finite_is_refused_by_who_reads_it_too(tmp_path: Path) -> None:
    folder = write_plain(tmp_path)
    changes.number(float("nan"))(folder)
    assert examine(folder, "model.path") == [], "its caller loads the weights"
    with StoredModel(folder) as stored, pytest.raises(DataError, match=r"model\.norm\.weight has numbers that are not"):
        dict(read_full(stored, torch.float32))


def test_a_tied_head_of_other_values_is_refused_by_who_reads_it_too(tmp_path: Path) -> None:
    folder = write_plain(tmp_path)
    changes.tied(folder, alike=False)
    with StoredModel(folder) as stored, pytest.raises(DataError, match=r"which its config\.json ties"):
        dict(read_full(stored, torch.float32))


def test_weights_that_take_too_long_are_left_to_who_loads_them(tmp_path: Path) -> None:
    (notice,) = examine(write_plain(tmp_path), "model.path", read_s=-1.0)
    assert notice.startswith("0.0 of 0.0 GB of weights")
    assert notice.endswith("the rest is checked when it is loaded")


def test_a_value_model_needs_no_head_and_no_equal_one(tmp_path: Path) -> None:
    folder = write_plain(tmp_path)
    changes.tied(folder, alike=False)
    assert examine(folder, "learner.roles.critic.path", tokenizer=False, backbone_only=True) == []
