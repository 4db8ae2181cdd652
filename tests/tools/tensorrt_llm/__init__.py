"""Tests of the checker of TensorRT-LLM names."""
