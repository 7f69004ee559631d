"""Texts as tokens: masks are exact to the token."""

from __future__ import annotations

from rollmesh.mesh.masked_text import tokenize_spans
from tests.learner.data.test_chat_turns import make_tokenizer


def test_a_token_across_a_border_is_cut_as_generators_see_the_prompt() -> None:
    tokenizer = make_tokenizer(pieces=["ab", "cd"])
    whole = tokenize_spans(tokenizer, "abcd", [(2, 4)], special_tokens=False)
    assert tokenizer.convert_ids_to_tokens(whole.ids.tolist()) == ["ab", "cd"]
    assert whole.trained.tolist() == [False, True]
    cut = tokenize_spans(tokenizer, "abcd", [(1, 4)], special_tokens=False)
    assert tokenizer.convert_ids_to_tokens(cut.ids.tolist()) == ["a", "b", "cd"]
    assert cut.trained.tolist() == [False, True, True]
