"""The sglang engine: a server of SGLang, started here or found at an address, driven over HTTP."""
