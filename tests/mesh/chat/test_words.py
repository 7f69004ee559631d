"""Words that a template loses where a probe has none of their kind: they are looked for in each rendering."""

from __future__ import annotations

from typing import Any

import pytest

from rollmesh.learner.data.chat_turns import ChatEncoder
from rollmesh.learner.data.prompts import PromptEncoder
from rollmesh.learner.data.rows import Row
from rollmesh.mesh.chat.words import check_words
from rollmesh.mesh.errors import ChatTemplateError
from tests import chat_templates as of

LONG = "Word 42\t and  more\n\n" * 40 + "End"
SAID = [{"role": "user", "content": LONG}, {"role": "assistant", "content": LONG}]
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}


def trained(template: str, messages: list[dict[str, Any]]) -> str:
    tokenizer = of.tokenizer_for(template)
    tokens = ChatEncoder(tokenizer).encode(messages, [len(messages) - 1])
    return str(tokenizer.decode(tokens.ids[tokens.trained]))


@pytest.mark.parametrize(
    "changed", ["lower", "truncate(300)", "replace('  ', ' ')", "replace('\t', ' ')", "replace('42', '')"]
)
def test_a_template_that_changes_the_words_of_a_row_is_refused(changed: str) -> None:
    template = of.CHATML.replace("m.content or ''", f"(m.content or '') | {changed}")
    with pytest.raises(ChatTemplateError, match="changes the words of message 0, or leaves them out: 'Word 42"):
        trained(template, SAID)
    encoder = PromptEncoder(of.tokenizer_for(template), max_prompt_tokens=9999, template_kwargs={})
    with pytest.raises(ChatTemplateError, match="row 3: the chat template changes the words of message 0"):
        encoder.ids(Row(SAID[:1], "", None, {}, origin="rows.jsonl, row 3"))


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ({"role": "assistant", "content": "<think>a</think>\n\nb"}, "b"),
        ({"role": "user", "content": " a "}, "a"),
        ({"role": "user", "content": "Why? /no_think"}, "Why?"),
        ({"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image"}]}, "<image>a"),
        ({"role": "tool", "content": '{"a": 1}'}, '"{\\"a\\": 1}"'),
        ({"role": "assistant", "content": None, "tool_calls": [CALL]}, ""),
    ],
)  # fmt: skip
def test_thoughts_white_space_settings_and_results_of_tools_may_be_written_otherwise(
    message: dict[str, Any], text: str
) -> None:
    check_words([message], text)
