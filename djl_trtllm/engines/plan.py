"""How to compile and run one model: the base class of the backends' plans, and the identity of a checkpoint."""

import fnmatch
import hashlib
import json
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from djl_trtllm.config import Backend, Config, DType, Task
from djl_trtllm.engines.cache import FileHashes, Manifest, OptionValue, cache_key
from djl_trtllm.engines.compiler import Compiler, CompileSpec
from djl_trtllm.errors import ModelError
from djl_trtllm.model import Layout, ModelShape
from djl_trtllm.model.adapter import AdapterLimits
from djl_trtllm.model.checkpoint import read_object
from djl_trtllm.model.pooling import Head

_MOST_THREADS = 8
_SAFETENSORS = ("*.safetensors", "*.safetensors.index.json")
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".index.json")
_PICKLED = ("pytorch_model*.bin", "pytorch_model*.bin.index.json", "*.pt", "*.pth")
_CONFIG_AND_TOKENIZER = (
    "config.json",
    "generation_config.json",
    "quantize_config.json",
    "quantization_config.json",
    "hf_quant_config.json",
    "tokenizer*.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "chat_template.json",
    "*.jinja",
    "preprocessor_config.json",
    "processor_config.json",
)


def checkpoint_identity(checkpoint: Path, tokenizer_dir: Path | None = None, hashes: FileHashes | None = None) -> str:
    """`sha256:...` over the sorted (name, size, sha256) of a checkpoint's config, weight and tokenizer files.

    Two directories with the same identity compile to the same engine, wherever they are. Model cards, serving
    configuration and nested directories are not part of it. Reads every byte that is not in `hashes` (see `FileHashes`
    for the cost), several files at a time.

    Raises ModelError if a file cannot be read.
    """
    hashes = FileHashes() if hashes is None else hashes
    named = [(path.name, path) for path in identity_files(checkpoint)]
    if tokenizer_dir is not None and tokenizer_dir.resolve() != checkpoint.resolve():
        named += [(f"tokenizer/{path.name}", path) for path in _matching(tokenizer_dir, _CONFIG_AND_TOKENIZER)]
    named.sort()
    digest = hashlib.sha256()
    try:
        with ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1)) as pool:
            for (name, path), file_hash in zip(
                named, pool.map(hashes.sha256, [path for _, path in named]), strict=True
            ):
                digest.update(json.dumps([name, path.stat().st_size, file_hash]).encode())
    except OSError as error:
        raise ModelError(f"cannot read the checkpoint {checkpoint}: {error}") from error
    return f"sha256:{digest.hexdigest()}"


def identity_files(checkpoint: Path) -> list[Path]:
    """The files that decide the compiled engine; pickled weights only if there are no safetensors."""
    weights = _matching(checkpoint, _SAFETENSORS) or _matching(checkpoint, _PICKLED)
    code = _matching(checkpoint, ("*.py",)) if _has_own_code(checkpoint) else []
    return weights + code + _matching(checkpoint, _CONFIG_AND_TOKENIZER)


def copy_identity_files(checkpoint: Path, tokenizer_dir: Path, out: Path, *, without: Iterable[str] = ()) -> None:
    """Copy configuration, tokenizer and code files as they are into an engine directory, over what the compiler wrote.

    Weights are not copied, nor the files named in `without`. Raises OSError.
    """
    for source in dict.fromkeys((checkpoint, tokenizer_dir)):
        for path in identity_files(source):
            if not path.name.endswith(_WEIGHTS) and path.name not in without:
                shutil.copyfile(path, out / path.name)


def _matching(directory: Path, patterns: Iterable[str]) -> list[Path]:
    return [
        path
        for path in sorted(directory.iterdir())
        if path.is_file() and any(fnmatch.fnmatchcase(path.name, pattern) for pattern in patterns)
    ]


def _has_own_code(checkpoint: Path) -> bool:
    try:
        return "auto_map" in (read_object(checkpoint / "config.json", ModelError) or {})
    except ModelError:
        return False  # who loads the model says so


_MOST_LOOKAHEAD = 16
_LONGEST_TEXT = 8192
"""The most tokens of a text for a vector, unless the user allows more: attention takes their square."""
DRAFT_FOLDER = "draft"
"""The folder for a compiled draft model in the engine's directory."""


@dataclass(frozen=True, kw_only=True)
class EnginePlan(ABC):
    """Derived by `plan_engine` from configuration, model files and machine.

    `source` is the checkpoint or engine directory, `task` what the model is for, `asked` the build options that the
    user set. At most `max_sequences` run at once, each with at most `max_seq_len` tokens, of which at most
    `max_input_len` are prompt. `notes` say what was changed and why, one line each, for the log. `engine_dir` is the
    engine once it is known (see `at`), `draft` the plan of a draft model that is compiled and cached by itself,
    `hash_store` a folder for cached hashes. The output of `stream_interval` iterations, and of those within
    `send_interval` seconds, is sent together where the engine process runs them; an engine that iterates itself does
    that itself.
    """

    backend: Backend
    reason: str
    source: Path
    tokenizer_dir: Path
    task: Task = Task.GENERATE
    max_sequences: int
    max_seq_len: int
    max_input_len: int
    trust_remote_code: bool = False
    asked: Mapping[str, OptionValue] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    engine_dir: Path | None = None
    draft: "EnginePlan | None" = None
    hash_store: Path | None = None
    stream_interval: int = 1
    send_interval: float = 0.0
    adapter_limits: AdapterLimits | None = None
    """The LoRA adapters that the engine takes; None where it takes none."""
    head: Head | None = None
    """How a model embeds or scores; None for a model that generates."""

    executor: ClassVar[str]
    """The executor as `module:Class`; only the engine process imports it."""

    reasons: ClassVar[str] = ""
    """A regular expression: the lines of the engine's log that say why a load fails. "" for none."""

    compiler: ClassVar[Compiler | None] = None
    """The compiler; None if the checkpoint itself is run."""

    @property
    def build_options(self) -> dict[str, OptionValue]:
        """Every option that affects the compiled engine."""
        return {}

    @property
    def recipe(self) -> str:
        """A description of what the compiler does."""
        return ""

    @property
    def served_with(self) -> dict[str, OptionValue]:
        """Build options for the serving.properties beside a compiled engine."""
        return {}

    @property
    def built_limits(self) -> dict[str, int]:
        """Limits by option for the manifest of a compiled engine; empty if the engine's own files have them."""
        return {}

    @property
    def gpus(self) -> int:
        return 0

    @property
    def lookahead(self) -> int:
        """Sequences that an engine gets beyond those that run, so that one is there when another ends."""
        return min(_MOST_LOOKAHEAD, max(2, self.max_sequences // 4))

    def pooling_options(self, max_num_tokens: int) -> dict[str, Any]:
        """The options of an executor that embeds or scores; `max_num_tokens` are those of an iteration."""
        assert self.head is not None
        return {
            "task": self.task.value,
            "activates": self.head.activates,
            "max_sequences": self.max_sequences,
            "max_seq_len": self.max_seq_len,
            "max_num_tokens": max_num_tokens,
        }

    def require_runtime(self) -> None:  # noqa: B027  # planning itself looks for most engines
        """Raise EngineError where this machine lacks a part of the engine that planning has not looked for."""

    def settled(self, config: Config) -> Config:
        """The configuration from which this was derived, with options that other options set."""
        return config

    @property
    def effects(self) -> Mapping[str, str]:
        """The effects of options in this plan, by name, where that depends on their value."""
        return {}

    @property
    def versions(self) -> dict[str, str]:
        """Installed versions of the packages that affect an engine."""
        return {}

    @property
    def platform(self) -> str:
        """The target of the compile, as in the manifest."""
        return ""

    @property
    def machine(self) -> str:
        """Anything else that keeps two machines from sharing a cached engine."""
        return ""

    @cached_property
    def checkpoint_identity(self) -> str:
        """The checkpoint's identity; reads all of it the first time (see `FileHashes`). Raises ModelError."""
        return checkpoint_identity(self.source, self.tokenizer_dir, FileHashes(self.hash_store))

    @property
    def cache_key(self) -> str:
        """The name of this plan's engine in a cache. Raises ModelError."""
        return cache_key(
            backend=self.backend.value,
            checkpoint=self.checkpoint_identity,
            options=self.build_options,
            versions=self.versions,
            platform=", ".join(filter(None, (self.platform, self.machine))),
        )

    @property
    def offline(self) -> bool:
        """Whether compiling needs nothing from the Hugging Face hub: a local checkpoint may have its code there."""
        return not self.trust_remote_code

    def compile_spec(self, out: Path) -> CompileSpec:
        """The compiler's input. Raises ValueError if nothing is compiled."""
        raise ValueError(f"backend {self.backend} compiles nothing")

    def check_whole(self, directory: Path) -> Manifest | None:
        """Check the files of an engine directory without loading it, and return its manifest, if it has one.

        Raises EngineMismatchError naming each bad file.
        """
        raise ValueError(f"backend {self.backend} loads no engine")

    def check_fit(self, directory: Path, manifest: Manifest | None) -> None:
        """Raise EngineMismatchError with every difference between a complete engine and this machine or options."""
        raise ValueError(f"backend {self.backend} loads no engine")

    def check(self, directory: Path) -> Manifest | None:
        """`check_whole` and `check_fit`: the manifest of an engine that can be served."""
        manifest = self.check_whole(directory)
        self.check_fit(directory, manifest)
        return manifest

    def at(self, engine_dir: Path) -> "EnginePlan":
        """This plan with the engine that `prepare_engine` compiled or found."""
        return replace(self, engine_dir=engine_dir)

    @abstractmethod
    def executor_options(self) -> dict[str, Any]:
        """The executor's options. Raises ValueError before `at()` if an engine is needed."""

    def describe(self) -> str:
        """One line for the log: the backend, why, the GPUs and the sizes."""
        line = f"backend {self.backend}: {self.reason}"
        line += f"; on {self.gpus} GPU{'s' if self.gpus > 1 else ''}" if self.gpus else ""
        texts = f"texts of up to {self.max_seq_len} tokens"
        return line if self.head is None else f"{line}; {self.head.describe()}; {texts}"

    def details(self) -> tuple[str, ...]:
        """The options in the engine's own terms, one line each."""
        return ()


def shared_fields(config: Config, layout: Layout) -> dict[str, Any]:
    """The fields that every plan derives from configuration and files alone."""
    return {
        "source": layout.path,
        "tokenizer_dir": layout.tokenizer_dir or layout.path,
        "trust_remote_code": config.options.trust_remote_code,
        "engine_dir": layout.engine_dir if layout.kind.is_engine else None,
        "hash_store": config.engine_cache_dir / "hashes",
        "stream_interval": 1 if config.options.stream_interval == "auto" else config.options.stream_interval,
    }


def asked_options(config: Config) -> dict[str, OptionValue]:
    """The options that make another engine, where the user set them, as a manifest has them."""
    options = config.options
    asked: dict[str, OptionValue] = {}
    if options.dtype is not DType.AUTO:
        asked["dtype"] = options.dtype.value
    if config.is_set("quantize"):
        asked["quantize"] = "none" if options.quantize is None else options.quantize.value
    return asked


def planned_sequences(config: Config) -> int:
    """The number of concurrent sequences: the smaller of `max_rolling_batch_size` and `max_num_sequences`."""
    options = config.options
    return min(options.max_rolling_batch_size, options.max_num_sequences or options.max_rolling_batch_size)


def planned_length(config: Config, shape: ModelShape, notes: list[str]) -> int:
    """Tokens of the longest sequence, at most the model's context; adds to `notes` if the user asked for more."""
    options = config.options
    wanted = options.max_seq_len or options.max_input_len + options.max_output_len
    context = shape.max_position_embeddings
    if context is None or wanted <= context:
        return wanted
    names = ["max_seq_len"] if options.max_seq_len else ["max_input_len", "max_output_len"]
    if config.is_set(names[0]) or config.is_set("max_output_len"):
        asked = " and ".join(config.format_setting(name) for name in names)
        notes.append(f"the longest sequence is {context} tokens, the model's context, and not {wanted} as from {asked}")
    return context


def planned_text_length(config: Config, shape: ModelShape, head: Head, notes: list[str]) -> int:
    """Tokens of the longest text that becomes a vector or a score; adds to `notes` as `planned_length` does."""
    if config.is_set("max_seq_len") or config.is_set("max_input_len"):
        return planned_length(config, replace(shape, max_position_embeddings=head.max_length), notes)
    return min(head.max_length or _LONGEST_TEXT, _LONGEST_TEXT)


def planned_adapters(config: Config, shape: ModelShape) -> AdapterLimits | None:
    """The LoRA adapters that an engine takes, whatever modules they change; None where LoRA is off."""
    if not config.options.enable_lora:
        return None
    return AdapterLimits(
        max_rank=config.options.max_lora_rank,
        rank_setting=config.format_setting("max_lora_rank"),
        hidden=shape.hidden,
        layers=shape.num_layers,
    )
