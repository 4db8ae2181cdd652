"""Compares the table of TensorRT-LLM names with a package, and writes its page."""
