"""Ends of tokens: those of byte-level vocabularies are found as quickly as exactly."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from rollmesh.mesh.trajectory.token_ends import placed_ends, token_ends
from tests.learner.metrics.test_sample_tokens import TOKENIZERS, byte_level


class Spelled:
    """A tokenizer's two ways to a text; it counts how often the slow one is taken."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._special = {number for number, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        self.decoded = 0

    def decode(self, ids: Sequence[int]) -> str:
        self.decoded += 1
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def pieces(self, ids: Sequence[int]) -> list[str]:
        return ["" if number in self._special else self._tokenizer.id_to_token(number) for number in ids]

    def ends(self, ids: Sequence[int]) -> tuple[str, list[int]]:
        text = self.decode(ids)
        self.decoded = 0
        return text, token_ends(ids, text, self.pieces, self.decode)


@pytest.mark.parametrize("name", TOKENIZERS)
@given(st.data())
def test_ends_lead_through_any_text(name: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[name]()
    ids = data.draw(st.lists(st.integers(0, tokenizer.get_vocab_size() - 1), max_size=60))
    spelled = Spelled(tokenizer)
    text, ends = spelled.ends(ids)
    assert len(ends) == len(ids)
    assert ends == sorted(ends)
    assert not ids or ends[-1] == len(text)
    if name == "bytes":
        assert not spelled.decoded
        # A prefix of tokens that ends between characters decodes to the text up to there.
        for count, end in enumerate(ends):
            prefix = spelled.decode(ids[: count + 1])
            assert "\ufffd" in prefix or prefix == text[:end]


def test_a_character_of_several_tokens_ends_with_its_last() -> None:
    spelled = Spelled(byte_level())
    ids = byte_level().encode("a🙃b").ids
    text, ends = spelled.ends(ids)
    assert text == "a🙃b"
    assert ends[0] == 1
    assert ends[-2:] == [2, 3]
    assert set(ends[1:-2]) <= {1}


def test_a_text_at_the_end_of_a_response() -> None:
    assert placed_ends([1, 3], "abc", tokens=4, begin=2, whole=True) == [0, 0, 1, 3]
    assert placed_ends([1, 3], "said otherwise", tokens=4, begin=2, whole=False) == [0, 0, 0, 14]
    assert placed_ends([], "", tokens=0, begin=0, whole=False) == []
