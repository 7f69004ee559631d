"""Values of kept samples' tokens: the text is divided exactly, and what is written gives the values back."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from functools import cache
from itertools import chain, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from examples.demo.model import build_tokenizer
from rollmesh.learner.metrics.sample_tokens import describe_tokens, to_entries
from rollmesh.mesh.trajectory.payload_codec import Trajectory
from rollmesh.mesh.trajectory.text_division import characters_per_token
from rollmesh.mesh.trajectory.versions import PolicyVersion, VersionRuns

TEXTS = ["the quick brown fox over the lazy dog", "naïve café, 日本語 日本, 🙂🙃"] * 3


@cache
def byte_level() -> Tokenizer:
    """Pieces of bytes, as Qwen's and Llama's: a character may be several tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, initial_alphabet=alphabet, special_tokens=["<end>"], show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


@cache
def metaspace() -> Tokenizer:
    """Words with a mark for the space, as SentencePiece's: the first space of a text is not said."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.train_from_iterator(
        TEXTS, trainers.BpeTrainer(vocab_size=120, special_tokens=["<end>"], show_progress=False)
    )
    return tokenizer


@cache
def characters() -> Tokenizer:
    """The demonstration's."""
    return build_tokenizer().backend_tokenizer


TOKENIZERS = {"bytes": byte_level, "words": metaspace, "characters": characters}


def divided(tokenizer: Tokenizer, ids: Sequence[int]) -> tuple[str, list[str]]:
    """A text, and the part of each token."""

    def decode(part: Sequence[int]) -> str:
        return tokenizer.decode(list(part), skip_special_tokens=True)

    text = decode(ids)
    counts = characters_per_token(ids, text, decode)
    assert len(counts) == len(ids)
    ends = np.cumsum([0, *counts]).tolist()
    return text, [text[start:end] for start, end in pairwise(ends)]


@pytest.mark.parametrize("name", TOKENIZERS)
@given(text=st.text(max_size=60))
def test_the_parts_of_any_text_make_it_up(name: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]()
    whole, parts = divided(tokenizer, tokenizer.encode(text).ids)
    assert "".join(parts) == whole


@pytest.mark.parametrize("name", TOKENIZERS)
@given(st.data())
def test_so_do_those_of_any_tokens(name: str, data: st.DataObject) -> None:
    """A policy may sample bytes that are no characters, and end tokens in the middle."""
    tokenizer = TOKENIZERS[name]()
    ids = data.draw(st.lists(st.integers(0, tokenizer.get_vocab_size() - 1), max_size=80))
    whole, parts = divided(tokenizer, ids)
    assert "".join(parts) == whole


def test_a_character_belongs_to_the_token_that_completes_it() -> None:
    tokenizer = byte_level()
    ids = [tokenizer.token_to_id(token) for token in ("a", "ð", "Ł", "Ļ", "Ģ", "<end>", "b")]
    assert divided(tokenizer, ids) == ("a🙀b", ["a", "", "", "", "🙀", "", "b"])


def test_a_tokenizer_that_decodes_otherwise_leads_nowhere_beyond_the_text() -> None:
    counts = characters_per_token([1, 2, 3], "abc", lambda ids: "x" * len(ids))
    assert counts == [0, 0, 0]


def expanded(entries: Sequence[object]) -> list[object]:
    """The inverse of `to_entries`, as docs/tracking.md tells it."""
    return list(chain.from_iterable([e[1]] * e[0] if isinstance(e, list) else [e] for e in entries))


@given(st.lists(st.sampled_from([None, 0, 1, -0.25])))
def test_entries_give_the_values_back(values: list[float | None]) -> None:
    entries = to_entries(values)
    assert expanded(json.loads(json.dumps(entries))) == values
    assert len(entries) <= len(values)


def response(tokens: int) -> Trajectory:
    """Letters of two versions, the second a tool's."""
    ids = np.array([characters().token_to_id(letter) for letter in ("abcd" * tokens)[:tokens]], np.int32)
    mask = np.ones(tokens, np.uint8)
    mask[1] = 0
    log_probs = np.linspace(-1, -2, tokens, dtype=np.float32) * mask
    older, newer = PolicyVersion(1, 3), PolicyVersion(1, 5)
    return Trajectory(ids, log_probs, mask, VersionRuns(((2, older), (tokens - 2, newer))))


def test_the_record_of_a_response() -> None:
    found = describe_tokens(
        response(4),
        "abcd",
        lambda ids: characters().decode(list(ids)),
        {
            "advantages": np.full(3, 0.70710678, np.float32),
            "policy_log_probs": np.array([-1.123456, math.nan, -math.inf], np.float32),
            "reference_log_probs": np.full(3, math.nan, np.float32),
        },
        lambda version: 6 - version.version,
        most=100,
    )
    assert found == {
        "count": 4,
        "characters": [[4, 1]],
        "mask": [1, 0, 1, 1],
        "staleness": [3, 3, 1, 1],
        "log_probs": [-1.0, None, -1.6667, -2.0],
        "advantages": [0.7071, None, 0.7071, 0.7071],
        "policy_log_probs": [-1.1235, [3, None]],
    }


def test_of_a_long_response_the_first_tokens_are_described() -> None:
    long = response(50)
    text = characters().decode(long.response_ids.tolist())
    found = describe_tokens(long, text, lambda ids: characters().decode(list(ids)), {}, lambda _: 0, most=10)
    assert found["count"] == 50
    assert found["characters"] == [[10, 1]]
    assert all(len(expanded(found[name])) == 10 for name in ("mask", "staleness", "log_probs"))
    # Rounded: every token costs less than its share in text.
    assert len(json.dumps(found)) < 10 * 25
