"""What the package has, what constructors do, what is built."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import importlib.util
from pathlib import Path
from typing import Any

from .common import PROMPT, attempt, engine_llm, llm_of, made, params, ranks, torch_llm


def signatures() -> Any:
    """All that can be seen of every owner in the table: names and defaults."""
    from tensorrt_llm._fake import names

    seen: dict[str, Any] = {}
    for owner, description in names.TABLE["owners"].items():
        if owner in ("generate_async", "LLM", "BaseLlmArgs") or owner.startswith("LLM."):
            continue
        made_class = getattr(importlib.import_module(description["module"]), owner)
        if hasattr(made_class, "model_fields"):
            seen[owner] = sorted(made_class.model_fields)
        elif dataclasses.is_dataclass(made_class):
            fields = [field.name for field in dataclasses.fields(made_class) if not field.name.startswith("_")]
            plain = [
                name
                for name, value in vars(made_class).items()
                if isinstance(value, property) and name in description["members"]
            ]
            seen[owner] = sorted({*fields, *plain})
        elif hasattr(made_class, "__members__"):
            seen[owner] = sorted(made_class.__members__)
        elif issubclass(made_class, RuntimeError):
            seen[owner] = []
    for owner, module in (("LLM.tensorrt", "tensorrt_llm._tensorrt_engine"), ("LLM.pytorch", "tensorrt_llm")):
        with contextlib.suppress(ImportError):
            seen[owner] = sorted(importlib.import_module(module).LLM._args_class.model_fields)
    return seen


def types_in_the_table() -> Any:
    """Types that are no Python expression."""
    from tensorrt_llm._fake import names

    return [
        member["type"]
        for owner in names.TABLE["owners"].values()
        for member in owner["members"].values()
        if member["kind"] != "method" and isinstance(attempt(functools.partial(names.type_of, member)), str)
    ]


def members_of_results(model: str) -> Any:
    llm = torch_llm(model)
    output = llm.generate(PROMPT, params(max_tokens=2))
    from tensorrt_llm._fake import names

    missing = [name for name in names.members("RequestOutput") if not hasattr(output, name)]
    missing += [name for name in names.members("CompletionOutput") if not hasattr(output.outputs[0], name)]
    missing += [name for name in names.members("LLM") if not hasattr(llm, name)]
    llm.shutdown()
    return missing


def modules() -> Any:
    """What is found without importing, and what imports."""
    spec = importlib.util.find_spec("tensorrt_llm")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    package = Path(spec.submodule_search_locations[0])
    llmapi = importlib.import_module("tensorrt_llm.llmapi")
    from importlib.metadata import version

    return {
        "files": (package / "_tensorrt_engine").exists(),
        "import": attempt(lambda: bool(importlib.import_module("tensorrt_llm._tensorrt_engine").LLM)),
        "BuildConfig": hasattr(llmapi, "BuildConfig"),
        "version": importlib.import_module("tensorrt_llm").__version__,
        "distribution": version("tensorrt_llm"),
        "tensorrt": attempt(lambda: version("tensorrt")),
    }


def construct(which: str, model: str, **arguments: Any) -> Any:
    """The error of a constructor, or "constructed"."""

    def call() -> str:
        llm_of(which, model, **arguments).shutdown()
        return "constructed"

    return attempt(call)


def build_and_save(model: str, engine: str, **arguments: Any) -> Any:
    llm = engine_llm(model, **arguments)
    llm.save(engine)
    steps = [label for label, _ in llm.llm_build_stats.build_steps_info]
    world = len(ranks())
    llm.shutdown()
    return {"files": sorted(path.name for path in Path(engine).iterdir()), "steps": steps, "ranks": world}


def settled(which: str, model: str, **arguments: Any) -> Any:
    """The arguments after the validators."""
    llm = llm_of(which, model, **arguments)
    names = ("max_batch_size", "max_num_tokens", "max_seq_len", "tensor_parallel_size")
    seen = {name: getattr(llm.args, name) for name in names}
    llm.shutdown()
    return seen


def objects(kind: str, **fields: Any) -> Any:
    """The error of making an object, or its explicit fields."""
    return attempt(lambda: made({"class": kind, **fields}).explicit_fields())


def plugin_config() -> Any:
    from tensorrt_llm.plugin import PluginConfig

    plugins = PluginConfig()
    plugins.tokens_per_block = 64
    seen = {
        "constructor": attempt(lambda: PluginConfig(tokens_per_block=64).tokens_per_block),
        "unknown keyword": attempt(lambda: hasattr(PluginConfig(nothing=64), "nothing")),
        "set": plugins.tokens_per_block,
        "unknown": attempt(lambda: setattr(plugins, "nothing", 1)),
        "wrong": attempt(lambda: setattr(plugins, "gemm_swiglu_plugin", "auto")),
        "disabled": attempt(lambda: PluginConfig(context_fmha="disable", nccl_plugin="disable").nccl_plugin),
        "auto": plugins.gpt_attention_plugin,
    }
    plugins.dtype = "bfloat16"
    return {**seen, "auto later": plugins.gpt_attention_plugin}
