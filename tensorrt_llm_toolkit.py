"""`tensorrt_llm_toolkit` of LMI's TensorRT-LLM containers, as far as the finder document uses it (docs/sizing.md).

    from tensorrt_llm_toolkit.utils.utils import max_token_finder

The real toolkit, a package, wins wherever it is installed. In a folder that has both, Python takes the package and not
this module. Anywhere else on the path this module finds it, and puts it in its own place.
"""

import importlib.util
import sys
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any


def _real() -> "ModuleSpec | None":
    """The real toolkit in another folder. It is a package with an `__init__.py`, and what this file is not."""
    here = Path(__file__).resolve().parent
    spec = PathFinder.find_spec(__name__, [entry for entry in sys.path if Path(entry).resolve() != here])
    return spec if spec is not None and spec.loader is not None and spec.submodule_search_locations else None


_INSTEAD = {
    "create_model_repo": "`djl-trtllm compile CHECKPOINT OUT` builds engines",
    "init_inference": "`djl_trtllm.LLM(model, **options)` loads a model, `djl-trtllm serve MODEL` serves it",
    "generate": "`djl_trtllm.LLM(model).generate(prompts)` generates",
    "fetch": "`djl_trtllm.LLM(model).generate(prompts)` returns whole outputs, `djl-trtllm serve MODEL` streams tokens",
    "tokenizer": "`transformers.AutoTokenizer.from_pretrained(model)` is the model's tokenizer",
}


def __getattr__(name: str) -> Any:
    if name in _INSTEAD:
        raise ImportError(f"tensorrt_llm_toolkit.{name} is not part of djl-trtllm: {_INSTEAD[name]}")
    raise AttributeError(
        f"module {__name__!r} has no attribute {name!r}; of LMI's toolkit it has utils.utils.max_token_finder only"
    )


_spec = _real()
if _spec is not None and _spec.loader is not None:
    _module = importlib.util.module_from_spec(_spec)
    sys.modules[__name__] = _module
    _spec.loader.exec_module(_module)
else:
    from djl_trtllm import finder as toolkit

    __path__: "list[str]" = []  # a package for `import`, with modules that are made here
    utils = ModuleType(f"{__name__}.utils")
    utils.__path__ = []
    utils.utils = toolkit  # type: ignore[attr-defined]
    sys.modules[utils.__name__] = utils
    sys.modules[f"{utils.__name__}.utils"] = toolkit
