"""Find a model's files, identify them and load the tokenizer.

A path, directory or archive, becomes a directory. The directory's content, never its name, decides which kind of model
it is. The tokenizer turns text into ids and back. Files are not trusted: archives are extracted within limits, and
code that comes with a model runs only if the operator allows it.
"""

from djl_trtllm.model.archive import open_model
from djl_trtllm.model.checkpoint import ModelShape
from djl_trtllm.model.layout import Layout, ModelKind, handle_requirements, inspect, inspect_config
from djl_trtllm.model.tokenizer import Tokenizer, TokenTexts, load_tokenizer

__all__ = [
    "Layout",
    "ModelKind",
    "ModelShape",
    "TokenTexts",
    "Tokenizer",
    "handle_requirements",
    "inspect",
    "inspect_config",
    "load_tokenizer",
    "open_model",
]
