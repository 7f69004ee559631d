"""The sglang engine: an SGLang server, started here or found at an address, driven over HTTP."""
