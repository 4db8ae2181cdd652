"""How one model is compiled and run: the base of the plans of the backends, and what they derive alike."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from djl_trtllm.config import Backend, Config
from djl_trtllm.config.format_setting import format_setting
from djl_trtllm.engines.cache import cache_key
from djl_trtllm.engines.compiler import Compiler
from djl_trtllm.engines.file_hashes import FileHashes
from djl_trtllm.engines.identity import checkpoint_identity
from djl_trtllm.engines.manifest import Manifest, OptionValue
from djl_trtllm.engines.spec import CompileSpec
from djl_trtllm.model import Layout, ModelShape


@dataclass(frozen=True, kw_only=True)
class EnginePlan(ABC):
    """What configuration, model files and machine come to. Made by `plan_engine`.

    `source` is the checkpoint or engine directory, `asked` those build options that the user set. `max_sequences` run
    at once, each of at most `max_seq_len` tokens, of which `max_input_len` at most are the prompt's. `notes` tell what
    was changed and why, one line each, for the log. `engine_dir` is the engine once it is known (see `at`),
    `hash_store` a folder for remembered hashes.
    """

    backend: Backend
    reason: str
    source: Path
    tokenizer_dir: Path
    max_sequences: int
    max_seq_len: int
    max_input_len: int
    trust_remote_code: bool = False
    asked: Mapping[str, OptionValue] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    engine_dir: Path | None = None
    hash_store: Path | None = None

    executor: ClassVar[str]
    """Its executor, as `module:Class`: imported in the engine process only."""

    compiler: ClassVar[Compiler | None] = None
    """What compiles it; None where the checkpoint itself is run."""

    @property
    def build_options(self) -> dict[str, OptionValue]:
        """Every option that changes the compiled engine."""
        return {}

    @property
    def recipe(self) -> str:
        """What the compiler makes of the checkpoint, in words."""
        return ""

    @property
    def served_with(self) -> dict[str, OptionValue]:
        """Build options that stand in the serving.properties beside a compiled engine."""
        return {}

    @property
    def gpus(self) -> int:
        """How many GPUs one engine takes."""
        return 0

    @property
    def versions(self) -> dict[str, str]:
        """Installed versions of the packages that shape an engine."""
        return {}

    @property
    def platform(self) -> str:
        """What the engine is compiled for, as its manifest has it."""
        return ""

    @property
    def machine(self) -> str:
        """What besides keeps two machines from sharing an engine in a cache."""
        return ""

    @cached_property
    def checkpoint_identity(self) -> str:
        """Content identity of the checkpoint; reads all of it the first time (see `FileHashes`). Raises ModelError."""
        return checkpoint_identity(self.source, self.tokenizer_dir, FileHashes(self.hash_store))

    @property
    def cache_key(self) -> str:
        """Name of this plan's engine in a cache. Raises ModelError."""
        return cache_key(
            backend=self.backend.value,
            checkpoint=self.checkpoint_identity,
            options=self.build_options,
            versions=self.versions,
            platform=", ".join(filter(None, (self.platform, self.machine))),
        )

    @property
    def offline(self) -> bool:
        """Whether compiling needs nothing from the Hugging Face hub: of a local checkpoint only code lies elsewhere."""
        return not self.trust_remote_code

    def compile_spec(self, out: Path) -> CompileSpec:
        """What the compiler is told. Raises ValueError where nothing is compiled."""
        raise ValueError(f"backend {self.backend} compiles nothing")

    def check_whole(self, directory: Path) -> Manifest | None:
        """Check the files of an engine directory without loading it, and return its manifest (None: it has none).

        Raises EngineMismatchError naming each bad file.
        """
        raise ValueError(f"backend {self.backend} loads no engine")

    def check_fit(self, directory: Path, manifest: Manifest | None) -> None:
        """Raise EngineMismatchError with everything in which a whole engine differs from this machine or options."""
        raise ValueError(f"backend {self.backend} loads no engine")

    def at(self, engine_dir: Path) -> EnginePlan:
        """This plan with the engine that `prepare` made or found."""
        return replace(self, engine_dir=engine_dir)

    @abstractmethod
    def executor_options(self) -> dict[str, Any]:
        """What the executor is started with. Raises ValueError before `at()` gave the place of a needed engine."""

    def describe(self) -> str:
        """One line for the log: the backend, why, and the sizes."""
        return f"backend {self.backend}: {self.reason}"

    def details(self) -> tuple[str, ...]:
        """What the options come to in the engine's own words, one line each."""
        return ()


def common_facts(config: Config, layout: Layout) -> dict[str, Any]:
    """The fields that every plan takes from configuration and files alone."""
    return {
        "source": layout.path,
        "tokenizer_dir": layout.tokenizer_dir or layout.path,
        "trust_remote_code": config.options.trust_remote_code,
        "engine_dir": layout.engine_dir if layout.kind.is_engine else None,
        "hash_store": config.engine_cache_dir / "hashes",
    }


def planned_sequences(config: Config) -> int:
    """How many sequences run at once: the smaller of `max_rolling_batch_size` and `max_num_sequences`."""
    options = config.options
    return min(options.max_rolling_batch_size, options.max_num_sequences or options.max_rolling_batch_size)


def planned_length(config: Config, shape: ModelShape, notes: list[str]) -> int:
    """Tokens of the longest sequence, at most the model's context; adds to `notes` where the user asked for more."""
    options = config.options
    wanted = options.max_seq_len or options.max_input_len + options.max_output_len
    context = shape.max_position_embeddings
    if context is None or wanted <= context:
        return wanted
    name = "max_seq_len" if options.max_seq_len else "max_input_len"
    if config.is_set(name) or config.is_set("max_output_len"):
        asked = format_setting(config, name) if options.max_seq_len else _both_lengths(config)
        notes.append(f"the longest sequence is {context} tokens, the model's context, and not {wanted} as from {asked}")
    return context


def _both_lengths(config: Config) -> str:
    return f"{format_setting(config, 'max_input_len')} and {format_setting(config, 'max_output_len')}"
