"""OpenAI's API: chat completions, completions and models, with vLLM's `/tokenize` and `/detokenize`."""
