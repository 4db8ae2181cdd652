"""`tensorrt_llm_toolkit` of LMI's TensorRT-LLM containers, as far as the finder document uses it (docs/sizing.md).

    from tensorrt_llm_toolkit.utils.utils import max_token_finder

The real toolkit, a package, wins wherever it is installed. In a folder that has both, Python takes the package and not
this module. Anywhere else on the path this module finds it, and puts it in its own place.
"""

import importlib.util
import sys
from functools import partial
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
    "get_python_backend_engine_path": "`djl-trtllm compile CHECKPOINT OUT` builds engines, and OUT is their folder",
}
_OTHERS = (
    "of LMI's toolkit there is utils.utils.max_token_finder; `djl-trtllm compile` builds engines, `djl-trtllm serve` "
    "serves models, and `djl_trtllm.LLM` generates in this process"
)


def _refusal(name: str) -> str:
    return f"{name} is not part of djl-trtllm: {_INSTEAD.get(name.rpartition('.')[2], _OTHERS)}"


def _absent(module: str, name: str) -> Any:
    """Refuse an attribute that a module has not: with ImportError where the real toolkit is known to have it."""
    raise (ImportError if name in _INSTEAD else AttributeError)(_refusal(f"{module}.{name}"))


class _Absent:
    """The last finder of `import`, which refuses the toolkit's other modules, and names that are imported from one."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        if name.startswith(f"{__name__}."):
            raise ImportError(_refusal(name), name=name)


def _module_of(name: str, **members: Any) -> ModuleType:
    """A module that is made here; for `import` it is a package."""
    module = ModuleType(name)
    vars(module).update(members, __path__=[], __getattr__=partial(_absent, name))
    sys.modules[name] = module
    return module


_spec = _real()
if _spec is not None and _spec.loader is not None:
    _module = importlib.util.module_from_spec(_spec)
    sys.modules[__name__] = _module
    _spec.loader.exec_module(_module)
else:
    from djl_trtllm.finder import max_token_finder

    __path__: "list[str]" = []  # a package for `import`
    __getattr__ = partial(_absent, __name__)
    utils = _module_of(
        f"{__name__}.utils", utils=_module_of(f"{__name__}.utils.utils", max_token_finder=max_token_finder)
    )
    sys.meta_path.append(_Absent)
