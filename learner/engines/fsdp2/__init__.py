"""FSDP2 engine: Hugging Face causal language models that the probe finds right, on CPU (gloo) and CUDA (nccl)."""
