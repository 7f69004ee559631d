"""Prompts have the words of their rows, whatever form the template reads, and one begin token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rollmesh.learner.data.prompts import PromptEncoder
from rollmesh.learner.data.rows import PromptForm, Row
from rollmesh.mesh.errors import ChatTemplateError, DataError
from rollmesh.mesh.masked_text import continuation
from tests import chat_templates as of

TEXT = [{"role": "user", "content": "hello"}]
IN_PARTS = [{"role": "user", "content": [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]}]


def prompt_of(template: str, prompt: Any) -> str:
    tokenizer = of.tokenizer_for(template)
    encoder = PromptEncoder(tokenizer, max_prompt_tokens=99, template_kwargs={})
    return str(tokenizer.decode(encoder.ids(Row(prompt, "", None, {}, origin="rows.jsonl, row 3"))))


@pytest.mark.parametrize("template", [of.CHATML, of.PARTS, of.TRIMS, of.NEVER, of.MARKED])
@pytest.mark.parametrize("prompt", [TEXT, IN_PARTS], ids=["text", "parts"])
def test_a_content_stands_in_the_prompt_once(template: str, prompt: Any) -> None:
    text = prompt_of(template, prompt)
    assert text.count("hello") == 1
    assert "type" not in text


def test_words_that_would_vanish_are_refused_with_their_row() -> None:
    with pytest.raises(ChatTemplateError, match=r"rows\.jsonl, row 3: .*words of both"):
        prompt_of("{% for m in messages %}<|{{ m.role }}|>{% endfor %}", TEXT)
    with pytest.raises(ChatTemplateError, match=r"rows\.jsonl, row 3: message 0 has the role system"):
        prompt_of(of.LOSES_SYSTEM, [{"role": "system", "content": "be kind"}, *TEXT])


@pytest.mark.parametrize("text", ["hello", "<s>hello"])
def test_a_text_that_was_rendered_before_gets_no_second_begin_token(text: str) -> None:
    tokenizer = of.tokenizer_for(of.CHATML, begins=True)
    encoder = PromptEncoder(tokenizer, max_prompt_tokens=99, template_kwargs={})
    assert tokenizer.decode(encoder.ids(Row(text, "", None, {}))) == "<s>hello"
    tokens = continuation(tokenizer, text, " world")
    assert tokenizer.decode(tokens.ids) == "<s>hello world<|im_end|>"
    assert tokenizer.decode(tokens.ids[tokens.trained]) == " world<|im_end|>"


@pytest.mark.parametrize("ended", ["", "<|im_end|>", "<|im_end|>\n"])
def test_a_text_that_was_rendered_before_has_one_end(ended: str) -> None:
    tokenizer = of.tokenizer_for(of.CHATML)
    tokens = continuation(tokenizer, "<|user|>hello<|im_end|>\n<|assistant|>", "world" + ended)
    assert tokenizer.decode(tokens.ids[tokens.trained]) == "world<|im_end|>"


@pytest.mark.parametrize("prompt", ["a\ud800b", [{"role": "user", "content": "a\ud800b"}]], ids=["text", "messages"])
def test_half_of_a_surrogate_pair_is_refused_by_name(prompt: Any) -> None:
    with pytest.raises(DataError, match="half of a surrogate pair at character"):
        prompt_of(of.CHATML, prompt)
    with pytest.raises(DataError, match="half of a surrogate pair at character 1"):
        continuation(of.tokenizer_for(of.CHATML), "a\ud800b", "c")


VERL = {"data_source": "x", "reward_model": {"ground_truth": "1"}}
TRL = {"answer": "1"}


def prompt_of_record(record: dict[str, Any], template: str) -> str:
    form, tokenizer = PromptForm(), of.tokenizer_for(template)
    given = {name: record[name] for name in form.columns(list(record))}
    encoder = PromptEncoder(tokenizer, max_prompt_tokens=999, template_kwargs={})
    return str(tokenizer.decode(encoder.ids(form.parse(Path("rows.jsonl"), 3, given, list(record)))))


@pytest.mark.parametrize("form", [VERL, TRL], ids=["verl", "trl"])
@pytest.mark.parametrize("name", ["system", "system_prompt"])
def test_a_row_with_a_system_prompt_beside_its_messages_has_it_in_the_prompt(form: dict[str, Any], name: str) -> None:
    assert prompt_of_record({"prompt": TEXT, name: "Be kind.", **form}, of.CHATML).startswith("<|system|>Be kind.")
    with pytest.raises(DataError, match=f"row 3: its prompt is a text, and `{name}` is for a conversation"):
        prompt_of_record({"prompt": "hello", name: "Be kind.", **form}, of.CHATML)
