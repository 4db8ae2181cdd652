"""A TensorRT-LLM without a GPU, for tests: installed for a subprocess by `fake_tensorrt_llm`.

Names, types and defaults come from the table of TensorRT-LLM names; behaviour is that of TensorRT-LLM's source, at the
places that a server meets, and as unkind. tests/trtllm compares it with an installed package.

What a response costs the caller is not a sleep but the same steps in the same order: unpickling of the batch and its
signature, a queue per request and one wake-up per batch, a task switch per consumer, then `_handle_response` with the
wrappers of executor/result.py (the PyTorch backend's results read through `__getattr__`). Slots, and properties that
hand out copies, stand for C++ objects.
"""
