"""Masks of conversations: exact to the token, whatever the template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from rollmesh.learner.data.chat_turns import ChatEncoder
from rollmesh.mesh.errors import DataError

_PROMPT = "{% if add_generation_prompt %}[a]{% endif %}"
PLAIN = "{% for m in messages %}[{{ m.role[0] }}]{{ m.content }}|{% endfor %}" + _PROMPT
LINES = PLAIN.replace("|", "|\n")
# As Qwen2.5 without instructions: turns end with another special token than texts.
ANOTHER_END = PLAIN.replace("|", "<e>\n")
MARKED = (
    "{% for m in messages %}[{{ m.role[0] }}]{% if m.role == 'assistant' %}{% generation %}{{ m.content }}|"
    "{% endgeneration %}{% else %}{{ m.content }}|{% endif %}{% endfor %}"
)
# As templates that leave the thoughts of earlier turns out.
FORGETFUL = (
    "{% for m in messages %}[{{ m.role[0] }}]{% if loop.last and m.role == 'assistant' %}so: {% endif %}"
    "{{ m.content }}|{% endfor %}" + _PROMPT
)
CHAT = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "one"},
    {"role": "user", "content": "more"},
    {"role": "assistant", "content": "two"},
]


def make_tokenizer(
    template: str | None = None, pieces: Sequence[str] = (), *, begins: bool = False
) -> PreTrainedTokenizerFast:
    """Tokens of single characters, but for the given pieces and the special tokens `<s>` and `<e>`.

    Args:
        template: for chats.
        pieces: longer texts with a token of their own.
        begins: texts get a begin token, `<s>`.
    """
    characters = "?|[]\n: " + "abcdefghijklmnopqrstuvwxyz"
    vocabulary = {token: index for index, token in enumerate([*characters, *pieces, "<s>", "<e>"])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    pattern = "|".join([*pieces, r"[\s\S]"])
    core.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")
    core.decoder = decoders.Fuse()
    if begins:
        core.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", vocabulary["<s>"])])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        unk_token="?",
        eos_token="|",
        bos_token="<s>" if begins else None,
        additional_special_tokens=["<e>"],
        chat_template=template,
    )


def trained_text(template: str, turns: Sequence[int], messages: Sequence[dict[str, Any]] = CHAT) -> str:
    """The trained part of a conversation."""
    tokenizer = make_tokenizer(template)
    tokens = ChatEncoder(tokenizer).encode(messages, turns)
    return "".join(tokenizer.convert_ids_to_tokens(tokens.ids[tokens.trained].tolist()))


@pytest.mark.parametrize("template", [PLAIN, LINES, MARKED])
def test_turns_are_trained_with_their_end_token_and_nothing_after_it(template: str) -> None:
    assert trained_text(template, [1, 3]) == "one|two|"
    assert trained_text(template, [3]) == "two|"


def test_a_turn_that_another_special_token_ends_is_trained_up_to_it() -> None:
    assert trained_text(ANOTHER_END, [1, 3]) == "one<e>two<e>"


def test_whole_text_is_what_the_template_writes() -> None:
    tokenizer = make_tokenizer(LINES)
    tokens = ChatEncoder(tokenizer).encode(CHAT, [3])
    assert tokens.ids.tolist() == tokenizer.apply_chat_template(CHAT, return_dict=False)


def test_a_template_that_changes_earlier_turns_trains_the_last_one_alone() -> None:
    assert trained_text(FORGETFUL, [3]) == "so: two|"
    with pytest.raises(DataError, match="message 1 otherwise") as caught:
        trained_text(FORGETFUL, [1, 3])
    assert "data.train_on: last" in caught.value.hint


def test_a_turn_without_text_is_trained_to_end() -> None:
    silent = [CHAT[0], {"role": "assistant", "content": ""}]
    assert trained_text(PLAIN, [1], silent) == "|"


def test_templates_are_needed_and_their_errors_are_named() -> None:
    with pytest.raises(DataError, match="no chat template"):
        ChatEncoder(make_tokenizer()).encode(CHAT, [1])
    with pytest.raises(DataError, match="template failed: only two"):
        ChatEncoder(make_tokenizer("{{ raise_exception('only two') }}")).encode(CHAT, [1])


def test_tools_and_further_arguments_reach_the_template() -> None:
    template = "{{ tools[0].name }}{{ mood }}" + PLAIN
    tokenizer = make_tokenizer(template)
    tokens = ChatEncoder(tokenizer, {"mood": "x"}).encode(CHAT[:2], [1], [{"name": "t"}])
    assert "".join(tokenizer.convert_ids_to_tokens(tokens.ids.tolist())) == "tx[u]hi|[a]one|"
