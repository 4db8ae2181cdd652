"""Inside the fake TensorRT-LLM; see `tests/fakes/__init__.py`.

Installed as `tensorrt_llm._fake`. The public modules around it are generated from the table of names, so that an
object is importable where the version has it and nowhere else.
"""
