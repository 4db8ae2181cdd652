"""Makes the table of vLLM's names, and compares it with a package."""
