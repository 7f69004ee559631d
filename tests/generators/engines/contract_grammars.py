"""The contract of inference engines for responses under a grammar."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from rollmesh.generators.openai_server.call_grammar import FORMS, call_grammar, json_grammar
from rollmesh.mesh.errors import PayloadError
from tests.generators.engines.harness import PROMPT, V1, V2, EngineHarness, constant_prefix, request

# A response of three texts, each some tokens long.
CHOICES = ("the quick fox", "the lazy dog", "to be")
ADD: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"properties": {"a": {"enum": [1]}, "b": {"type": "boolean"}}, "required": ["a", "b"]},
    },
}
GRAMMAR = "start: " + " | ".join(f'"{text}"' for text in CHOICES)


class GrammarSwapContract:
    """Part of `GrammarContract`: what depends on the keys of a response that outlives a swap."""

    def test_a_response_under_a_grammar_outlives_a_swap(self, harness: EngineHarness) -> None:
        if not harness.engine.takes_grammars:
            return
        harness.update(V1, harness.random_weights(7))
        under = request("a", grammar="start: /[a-z]{40,60}/", max_tokens=harness.long)
        harness.freeze([request("first", max_tokens=harness.long), under])
        harness.update(V2, harness.random_weights(8))
        harness.resume()
        [result] = harness.collector.wait(["a"])
        ids = result.sampled.response_ids.tolist()
        text = harness.text(ids[:-1] if ids[-1] == harness.eos else ids)
        assert text.isalpha()
        assert text.islower()
        assert result.sampled.versions.newest == V2


class GrammarContract(GrammarSwapContract):
    """Part of `EngineContract`."""

    def test_a_response_is_of_its_grammar(self, harness: EngineHarness) -> None:
        harness.update(V1, harness.random_weights(7))
        if not harness.engine.takes_grammars:
            with pytest.raises(PayloadError, match=f"engine {harness.engine.name} takes none"):
                harness.engine.submit([request("a", grammar=GRAMMAR)])
            return
        free = [request(f"free-{index}", seed=index + 1, max_tokens=9) for index in range(3)]
        alone = [result.sampled.response_ids.tolist() for result in harness.run(free)]
        forced = [request(f"forced-{index}", seed=index + 1, grammar=GRAMMAR) for index in range(2 * harness.slots)]
        again = [request(f"again-{index}", seed=index + 1, max_tokens=9) for index in range(3)]
        results = harness.run([*forced, *again])
        for result in results[: len(forced)]:
            ids, log_probs = result.sampled.response_ids.tolist(), result.sampled.log_probs
            assert result.finish_reason == "stop"
            assert ids[-1] == harness.eos
            assert harness.text(ids[:-1]) in CHOICES
            # The last token was the only one that was allowed.
            assert np.isclose(log_probs[-1], 0, atol=1e-4)
            assert (log_probs <= 1e-4).all()
        if harness.seeded:
            assert [result.sampled.response_ids.tolist() for result in results[len(forced) :]] == alone

    def test_a_call_of_a_tool_can_be_required(self, harness: EngineHarness) -> None:
        if not harness.engine.takes_grammars:
            return
        form = next(form for form in FORMS if form.begin.startswith("<tool_call>") and not form.tagged)
        grammar = call_grammar(form, [ADD], lambda _: None, many=False)
        harness.update(V1, harness.random_weights(7))
        results = harness.run(
            [request(f"{index}", seed=index + 1, grammar=grammar, max_tokens=150) for index in (0, 1)]
        )
        for result in results:
            assert result.finish_reason == "stop"
            text = harness.text(result.sampled.response_ids.tolist()[:-1])
            call = json.loads(text.strip().removeprefix("<tool_call>").removesuffix("</tool_call>"))
            assert call["name"] == "add"
            assert call["arguments"] in ({"a": 1, "b": True}, {"a": 1, "b": False})

    def test_an_answer_can_be_required_to_be_json(self, harness: EngineHarness) -> None:
        if not harness.engine.takes_grammars:
            return
        harness.update(V1, harness.random_weights(7))
        schema = {"type": "object", **ADD["function"]["parameters"]}
        [result] = harness.run([request("a", grammar=json_grammar(schema), max_tokens=150)])
        assert result.finish_reason == "stop"
        answer = json.loads(harness.text(result.sampled.response_ids.tolist()[:-1]))
        assert answer in ({"a": 1, "b": True}, {"a": 1, "b": False})

    def test_a_grammar_that_cannot_be_read_is_refused_alone(self, harness: EngineHarness) -> None:
        if not harness.engine.takes_grammars:
            return
        harness.update(V1, harness.random_weights(7))
        wrong, good = harness.run([request("wrong", grammar='start: "a'), request("good", grammar=GRAMMAR)])
        assert "lexer error" in wrong.refusal
        assert (len(wrong.sampled), good.finish_reason) == (0, "stop")

    def test_log_probs_are_of_the_allowed_tokens_alone(self, harness: EngineHarness) -> None:
        """Greedy ones are those of temperature 1; a filter takes from what the grammar leaves."""
        if not harness.engine.takes_grammars:
            return
        either, last, temperature = [7, 9], 11, 0.7
        grammar = f"start: (<[{either[0]}]> | <[{either[1]}]>) <[{last}]>"
        weights = harness.random_weights(7)
        harness.update(V1, weights)
        drawn, greedy, single = harness.run(
            [
                request("drawn", grammar=grammar, temperature=temperature),
                request("greedy", grammar=grammar, temperature=0.0),
                request("single", grammar=grammar, top_k=1),
            ]
        )
        logits = harness.logits(weights, PROMPT)[-1][either].double()
        likelier = either[int(logits.argmax())]
        for result, scale in ((drawn, temperature), (greedy, 1.0), (single, 0.0)):
            first, *rest = result.sampled.response_ids.tolist()
            assert rest == [last, harness.eos]
            assert first in either if result is drawn else first == likelier
            expected = (logits / scale).log_softmax(-1)[either.index(first)] if scale else 0.0
            np.testing.assert_allclose(result.sampled.log_probs, [expected, 0, 0], atol=harness.tolerance)

    def test_only_engines_that_can_take_tokens_before_a_grammars_rest(self, harness: EngineHarness) -> None:
        if harness.engine.takes_grammars and not harness.engine.resumes_grammars:
            harness.update(V1, harness.random_weights(7))
            for more in ({"stream": True}, {"prefix": constant_prefix(9, 4, V1)}):
                with pytest.raises(PayloadError, match="draws such a response whole"):
                    harness.engine.submit([request("a", grammar=GRAMMAR, **more)])
