"""vLLM inside the generator's process: its AsyncLLM here, its engine core and workers as children of this process."""
