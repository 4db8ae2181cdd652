"""A TensorRT-LLM without a GPU, for tests: installed for a subprocess by `fake_tensorrt_llm`.

Names, types and defaults come from the table of TensorRT-LLM names; behaviour is that of TensorRT-LLM's source, at the
places that a server meets, and as unkind: see the tests beside this file, each of which holds one rule.
"""

from .installation import fake_tensorrt_llm, worker_processes

__all__ = ["fake_tensorrt_llm", "worker_processes"]
