"""`option.extra_llm_api_options`: arguments of TensorRT-LLM's LLM by its own names, in a YAML file or as JSON.

For example `kv_cache_config: {max_util_for_resume: 0.9}`.
"""

import ast
import importlib.util
from functools import cache
from pathlib import Path

from djl_trtllm.backends.effects import Effects, Target
from djl_trtllm.backends.extra_options import (
    ExtraArgument,
    Library,
    Signatures,
    declared_fields,
    inherited_fields,
    options_of,
    read_extra_options,
)
from djl_trtllm.backends.tensorrt_llm.names import all_members, members, owners
from djl_trtllm.config import Config
from djl_trtllm.config.tables import read_table

_PLACED = frozenset(read_table("options.toml", __package__)["places"])
"""Configuration objects whose fields options set too."""

# Arguments that the server sets itself, with what to do instead.
_OURS = {
    "model": "set option.model_id",
    "backend": "set option.backend",
    "tokenizer": "set option.tokenizer",
    "tokenizer_revision": "set option.tokenizer_revision",
    "revision": "set option.revision",
    "skip_tokenizer_init": "the engine needs the tokenizer for guides",
    "reasoning_parser": "set option.reasoning_parser: the server finds reasoning",
    "num_postprocess_workers": "it reads token ids and makes the text itself",
    "postprocess_tokenizer_dir": "it reads token ids and makes the text itself",
    "trust_remote_code": "set option.trust_remote_code: a file that comes with a model cannot allow the model's code",
    "enable_lora": "set option.enable_lora",
    "lora_config": "set option.enable_lora and the options of adapters",
}
# Arguments that are options under another name, where code derives the argument.
_DERIVED = {
    Target("LLM", "max_input_len"): "max_input_len",
    Target("LLM", "max_batch_size"): "max_rolling_batch_size",
    Target("KvCacheConfig", "free_gpu_memory_fraction"): "kv_cache_free_gpu_mem_fraction",
}


def apply_extra_options(
    config: Config, effects: Effects, llm: str, version: str, notes: list[str]
) -> tuple[Config, tuple[ExtraArgument, ...]]:
    """See `read_extra_options`; `llm` is the LLM of the backend as the table of names has it."""
    library = Library(
        option="extra_llm_api_options",
        engine=f"TensorRT-LLM {version}",
        owner="LLM",
        root=llm,
        signatures={**_tabled(llm, version), **_installed(llm)},
        ours=_OURS,
        options=options_of(effects, _DERIVED),
        placed=_PLACED,
    )
    return read_extra_options(config, library, notes)


@cache
def _tabled(llm: str, version: str) -> Signatures:
    """What the table of names has: for machines without TensorRT-LLM, and classes that are declared elsewhere."""
    of = {name: members(name, version) for name in {llm, *(row.owner for row in all_members())}}
    return {
        name: {member.name: member.type for member in known.values() if member.kind == "argument"}
        for name, known in of.items()
        if known and owners()[name].kind == "class"
    }


@cache
def _installed(llm: str) -> Signatures:
    """What the installed package declares, read without running it; nothing where there is none."""
    spec = importlib.util.find_spec("tensorrt_llm")
    declared = owners()[llm].declared
    if spec is None or declared is None or not spec.submodule_search_locations:
        return {}
    package = Path(spec.submodule_search_locations[0])
    module, _, root = declared.partition(":")
    classes: dict[str, tuple[list[str], dict[str, str]]] = {}
    for name in dict.fromkeys(("tensorrt_llm.llmapi.llm_args", module)):
        try:
            source = package.joinpath(*name.split(".")[1:]).with_suffix(".py").read_text(encoding="utf-8")
            classes |= {
                found.name: declared_fields(found)
                for found in ast.parse(source).body
                if isinstance(found, ast.ClassDef)
            }
        except (OSError, SyntaxError, UnicodeDecodeError):
            return {}
    found = {name: fields for name in classes if (fields := inherited_fields(name, classes))}
    return found | {llm: found[root]} if root in found else {}
