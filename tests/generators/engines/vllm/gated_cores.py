"""Imported by the process that vLLM's engine cores are forked from: puts the gate before their steps."""

from __future__ import annotations

from tests.generators.engines.vllm import step_gate

step_gate.install()
