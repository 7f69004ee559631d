"""Engines that decode by themselves (vLLM, SGLang), behind the interface of all engines."""
