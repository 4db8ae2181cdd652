"""The API of Truss's TensorRT-LLM template: a prompt in, raw text out."""
