"""A server on an installed vLLM: `scripts/test-vllm` runs them in an environment of its own."""
