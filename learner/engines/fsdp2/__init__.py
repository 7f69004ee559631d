"""FSDP2 engine: any Hugging Face causal language model, on CPU (gloo) and CUDA (nccl)."""
