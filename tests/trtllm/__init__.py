"""Contracts with TensorRT-LLM, held by its own releases: `docker/verify` runs them in NVIDIA's container.

The same tests run on the fake TensorRT-LLM everywhere, so that they are known to work before a GPU sees them. A test's
parameter `installed` is the real package: it is marked `trtllm`, and not there where the package is not.
"""
