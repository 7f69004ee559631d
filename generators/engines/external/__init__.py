"""Engines that decode by themselves (vLLM, SGLang), with the interface of all engines."""
