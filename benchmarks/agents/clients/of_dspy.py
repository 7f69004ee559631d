"""DSPy: each step is a conversation of its own, with fields in the form of its adapter."""

from __future__ import annotations

import os
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it asks a server for prices

import dspy
from cases import ASK, LOOK_UP, Number, Streamed, Way, lookup, main


def _model(way: Way) -> dspy.LM:
    return dspy.LM(f"openai/{way.model}", api_base=way.base_url, api_key=way.api_key, cache=False, num_retries=0)


def chat(way: Way) -> Any:
    return _model(way)(ASK)[0]


def tools(way: Way) -> Any:
    with dspy.context(lm=_model(way)):
        return dspy.ReAct("question -> number: int", [lookup])(question=LOOK_UP).number


def structured(way: Way) -> Any:
    with dspy.context(lm=_model(way), adapter=dspy.JSONAdapter()):
        return Number(number=dspy.Predict("question -> number: int")(question=ASK).number)


def fields(way: Way) -> Any:
    with dspy.context(lm=_model(way)):
        return Number(number=dspy.Predict("question -> number: int")(question=ASK).number)


async def streaming(way: Way) -> Any:
    listener = dspy.streaming.StreamListener("number")
    with dspy.context(lm=_model(way)):
        asked = dspy.streamify(dspy.Predict("question -> number"), stream_listeners=[listener])
        parts = [part async for part in asked(question=ASK)]
    return Streamed([part.chunk for part in parts if isinstance(part, dspy.streaming.StreamResponse)])


main(["dspy"], chat=chat, tools=tools, structured=structured, fields=fields, streaming=streaming)
