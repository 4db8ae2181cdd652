"""Where a model's files are, and what they are.

A path, directory or archive, becomes a directory; the directory's content, never its name, says what kind of model it
holds; and its tokenizer turns text into ids and back. Nothing in the files is trusted: archives are extracted within
bounds, and no code that comes with a model runs unless the operator allows it.
"""

from djl_trtllm.model.archive import DEFAULT_BOUNDS, Bounds, extract, is_archive, open_model
from djl_trtllm.model.layout import ENGINE_FOLDER, Kind, Layout, inspect
from djl_trtllm.model.requirements import handle_requirements
from djl_trtllm.model.shape import ModelShape
from djl_trtllm.model.tokenizer import Tokenizer, load_tokenizer

__all__ = [
    "DEFAULT_BOUNDS",
    "ENGINE_FOLDER",
    "Bounds",
    "Kind",
    "Layout",
    "ModelShape",
    "Tokenizer",
    "extract",
    "handle_requirements",
    "inspect",
    "is_archive",
    "load_tokenizer",
    "open_model",
]
