"""A tokenizer with more tokens than its model has embeddings is refused, unless no prompt can hold what is beyond.

So is a role's model with other tokens than the actor's.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rollmesh.learner.model_files.tokenizer_checks import check_same_tokens, check_tokenizer
from rollmesh.mesh.errors import DataError


def write(folder: Path, added: list[dict[str, Any]], *, vocab: object = None, **config: object) -> None:
    known = {"a": 0, "b": 1, "c": 2} if vocab is None else vocab
    wrapped = {"type": "TemplateProcessing", "special_tokens": {"<bos>": {"ids": [3]}}}
    tokenizer = {"model": {"vocab": known}, "added_tokens": added, "post_processor": wrapped}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def token(content: str, place: int, *, special: bool = True) -> dict[str, Any]:
    return {"id": place, "content": content, "special": special}


THINK = token("<think>", 4, special=False)


@pytest.mark.parametrize(
    ("added", "rest", "beyond"),
    [
        ([token("<bos>", 3)], {}, "'<bos>' (3)"),
        (
            [token("<pad>", 3), THINK],
            {"pad_token": "<pad>"},
            "1 tokens that the model has no embedding for: '<think>' (4)",
        ),
        ([token("<eos>", 3)], {"eos_token": "<eos>"}, "'<eos>' (3)"),
        ([token("<|im|>", 3)], {"chat_template": "{{ '<|im|>' + text }}"}, "'<|im|>' (3)"),
        ([token("<tool_call>", 3)], {}, "'<tool_call>' (3)"),
        ([], {"added_tokens_decoder": {"7": {"content": "<new>", "special": False}}}, "'<new>' (7)"),
        ([], {"vocab": {"a": 0, "d": 9}}, "'d' (9)"),
        ([], {"vocab": [["a", -1.0], ["b", -1.0], ["c", -2.0], ["d", -3.0]]}, "'d' (3)"),
    ],
)
def test_tokens_without_a_place_are_named(
    tmp_path: Path, added: list[dict[str, Any]], rest: dict[str, Any], beyond: str
) -> None:
    write(tmp_path, added, **rest)
    with pytest.raises(DataError) as refused:
        check_tokenizer(tmp_path, "model.path", 3)
    assert refused.value.message.startswith("model.path: ")
    assert beyond in refused.value.message
    check_tokenizer(tmp_path, "model.path", 10)


def test_a_template_of_its_own_counts(tmp_path: Path) -> None:
    write(tmp_path, [token("<pad>", 3)], pad_token="<pad>")
    check_tokenizer(tmp_path, "model.path", 3)
    (tmp_path / "chat_template.jinja").write_text("<pad>")
    with pytest.raises(DataError, match="'<pad>'"):
        check_tokenizer(tmp_path, "model.path", 3)


@pytest.mark.parametrize("pad", ["<pad>", {"content": "<pad>"}])
def test_what_no_text_holds_may_be_beyond(tmp_path: Path, pad: object) -> None:
    """A token to pad with, and the mark of an image that a model of text has from its family's tokenizer."""
    write(tmp_path, [token("<pad>", 3), token("<image>", 4)], vocab={"a": 0, "<pad>": 3}, pad_token=pad)
    check_tokenizer(tmp_path, "model.path", 3)


def test_other_tokenizers_are_left_alone_and_damaged_ones_are_named(tmp_path: Path) -> None:
    check_tokenizer(tmp_path, "model.path", 3)
    for text in ("{", "[]", '{"model": {"vocab": {"a": "b"}}}', '{"added_tokens": [{}]}'):
        (tmp_path / "tokenizer.json").write_text(text)
        with pytest.raises(DataError, match=r"^model.path: .*tokenizer\.json cannot be read"):
            check_tokenizer(tmp_path, "model.path", 3)


def two_folders(tmp_path: Path) -> tuple[Path, Path]:
    actor, role = tmp_path / "actor", tmp_path / "role"
    for folder in (actor, role):
        folder.mkdir()
        write(folder, [token("<eos>", 3)], eos_token="<eos>")
    return actor, role


@pytest.mark.parametrize(
    ("vocab", "added", "differing"),
    [
        ({"a": 0, "b": 2, "c": 1}, [token("<eos>", 3)], "2 differ. The first is 'b': 1 there, 2 here"),
        ({"a": 0, "b": 1}, [token("<eos>", 3)], "1 differ. The first is 'c': 2 there, absent here"),
        ({"a": 0, "b": 1, "c": 2}, [token("<eos>", 4)], "1 differ. The first is '<eos>': 3 there, 4 here"),
    ],
)
def test_a_role_with_other_tokens_is_refused_by_the_first_of_them(
    tmp_path: Path, vocab: dict[str, int], added: list[dict[str, Any]], differing: str
) -> None:
    actor, role = two_folders(tmp_path)
    write(role, added, vocab=vocab)
    with pytest.raises(DataError) as refused:
        check_same_tokens(actor, role, "learner.roles.teacher.path", 10)
    assert refused.value.message.startswith("learner.roles.teacher.path: ")
    assert differing in refused.value.message


def test_a_role_may_have_further_tokens_and_a_vocabulary_padded_otherwise(tmp_path: Path) -> None:
    actor, role = two_folders(tmp_path)
    write(role, [token("<eos>", 3), THINK], eos_token="<eos>")
    check_same_tokens(actor, role, "learner.roles.teacher.path", 10)
    # A special token that no prompt holds does not matter.
    write(actor, [token("<eos>", 3), token("<unused>", 4)], eos_token="<eos>")
    check_same_tokens(actor, role, "learner.roles.teacher.path", 10)


def test_a_role_without_a_tokenizer_has_to_have_an_embedding_for_each_token(tmp_path: Path) -> None:
    actor, role = two_folders(tmp_path)
    (role / "tokenizer.json").unlink()
    check_same_tokens(actor, role, "learner.roles.critic.path", 4)
    with pytest.raises(DataError, match=r"'<eos>': 3 there, 3 here, where 3 tokens have an embedding"):
        check_same_tokens(actor, role, "learner.roles.critic.path", 3)
    (actor / "tokenizer.json").unlink()
    check_same_tokens(actor, role, "learner.roles.critic.path", 3)
