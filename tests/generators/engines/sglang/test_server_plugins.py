"""A plugin is found where packages are looked for, and has what it needs next to it."""

from __future__ import annotations

import json
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer

from rollmesh.generators.engines.external.model_info import ModelInfo
from rollmesh.generators.engines.request_validation import RequestLimits
from rollmesh.generators.engines.sglang import grammar_plugin, server_plugins
from tests.generators.engines.tiny import EOS, EOS_2, VOCABULARY, train_tokenizer

# More logits than tokens, as many models have.
LIMITS = RequestLimits(context=64, vocabulary=VOCABULARY + 20, eos=frozenset({EOS_2, EOS}))


def test_sglang_finds_a_plugin_on_its_path(tmp_path: Path) -> None:
    assert server_plugins.write_grammars(ModelInfo(LIMITS, train_tokenizer()), tmp_path / "new")
    [found] = distributions(path=[str(tmp_path / "new")])
    [entry] = found.entry_points.select(group="sglang.srt.plugins")
    assert (tmp_path / "new" / f"{entry.module}.py").read_text() == Path(grammar_plugin.__file__).read_text()
    assert callable(getattr(grammar_plugin, entry.attr))


def test_a_grammar_plugin_has_the_tokenizer_and_the_models_own_ends(tmp_path: Path) -> None:
    """As they are for texts of any length, though the tokenizer itself cuts and fills them."""
    tokenizer = train_tokenizer()
    tokenizer.backend_tokenizer.enable_truncation(2)
    tokenizer.backend_tokenizer.enable_padding(length=9)
    assert server_plugins.write_grammars(ModelInfo(LIMITS, tokenizer), tmp_path)
    assert tokenizer.backend_tokenizer.padding is not None, "it stays as it was"
    text = (tmp_path / grammar_plugin.TOKENIZER).read_text()
    told = "the quick brown fox"
    assert Tokenizer.from_str(text).encode(told).ids == train_tokenizer().encode(told)
    facts = json.loads((tmp_path / grammar_plugin.FACTS).read_text())
    known = LLTokenizer(text, n_vocab=facts["vocabulary"], eos_token=facts["ends"])
    assert (known.vocab_size, set(known.eos_tokens)) == (LIMITS.vocabulary, LIMITS.eos)
    assert not LLMatcher(known, f'start: "fox" <[{EOS}]>').is_error()


@pytest.mark.parametrize("tokenizer", [None, object()], ids=["none", "no fast one"])
def test_without_a_tokenizer_that_grammars_know_there_is_no_plugin(tmp_path: Path, tokenizer: Any) -> None:
    assert not server_plugins.write_grammars(ModelInfo(LIMITS, tokenizer), tmp_path)
    assert not list(tmp_path.iterdir())
