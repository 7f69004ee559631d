"""Jobs in vLLM's engine core: their parameters, their submission, and their outputs as chunks."""
