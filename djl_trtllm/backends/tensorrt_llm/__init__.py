"""TensorRT-LLM on NVIDIA GPUs."""
