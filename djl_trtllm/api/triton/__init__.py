"""The API of Triton's TensorRT-LLM models.

Shared by HTTP and gRPC, which know nothing of each other: `inputs`, `outputs`, `tensors`, `description`, `errors`.
"""
