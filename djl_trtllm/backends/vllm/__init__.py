"""vLLM as a backend: on NVIDIA GPUs, and on CPUs with its build for them (see docs/vllm.md)."""
