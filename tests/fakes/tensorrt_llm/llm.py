"""`tensorrt_llm.LLM`: the PyTorch backend, and AutoDeploy (facts §1.3, §2.4)."""

from __future__ import annotations

import atexit
import json
import runpy
import shutil
import tempfile
import weakref
from pathlib import Path
from typing import Any

from . import settings
from .build import CALIBRATED, build, load_hf_tokenizer, positions, pretrained_config, read_config
from .configs import AutoDeployLlmArgs, TorchLlmArgs, TrtLlmArgs
from .encoder import Encoder
from .executor import GenerationExecutorProxy, GenerationExecutorWorker
from .inputs import QWEN_VL, BaseMultimodalInputProcessor, create_input_processor, preprocess
from .mpi import pool_session
from .results import EncoderOutput, RequestOutput
from .sampling import SamplingParams
from .settings import (
    REFUSES_BY_DRAFTS,
    SINCE_1_3,
    RequestError,
    WorkerSettings,
    device_count,
    device_memory,
    enable_worker_single_process_for_tp1,
    logger,
    memory_model,
    record,
    script,
)

# -- what the LLM classes of all backends share (facts §2.1, §2.6) -----------------------------------------------------


class BaseLLM:
    """Loads on construction; see facts §2.1."""

    _owner = ""
    _args_class: Any = None
    _backend: str | None = None
    _encodes = False
    tokenizer: Any
    input_processor: Any

    def __init__(self, model: str | Path, **given: Any) -> None:
        record(self._owner, {"model": model, **given})
        self._executor: Any = None
        self.mpi_session: Any = None
        try:
            for name in given:
                if name not in self._args_class.model_fields and name not in ("_mpi_session", "backend"):
                    raise ValueError(f"{type(self).__name__} got invalid argument: {name}")
            self.args = self._args_class(model=model, **given)
        except Exception as error:
            logger.error(f"Failed to parse the arguments for the LLM constructor: {error}")
            raise
        if self.args.worker_count > 1:
            if device_count() < self.args.worker_count:
                raise RuntimeError(
                    f"Only {device_count()} GPUs are available, but {self.args.worker_count} are required."
                )
            logger.info(f"start MpiSession with {self.args.worker_count} workers")
            self.mpi_session = pool_session(self.args.worker_count)
        elif not device_count():
            raise RuntimeError("No CUDA GPUs are available")
        self._engine_dir: Path | None = None
        try:
            self._build_model()
        except Exception:
            if self.mpi_session is not None:
                self.mpi_session.shutdown()
            raise
        atexit.register(BaseLLM._shutdown_wrapper, weakref.ref(self))

    def _build_model(self) -> None:
        raise NotImplementedError

    def _load_tokenizer(self) -> Any:
        return load_hf_tokenizer(Path(self.args.tokenizer or self.args.model))

    # -- requests ------------------------------------------------------------------------------------------------------

    def generate_async(self, inputs: Any, sampling_params: Any = None, **others: Any) -> RequestOutput:
        """Only the first two arguments have the same place in every version (facts §2.6)."""
        record("generate_async", {"inputs": inputs, "sampling_params": sampling_params, **others})
        for name in others:
            if name not in settings.arguments("generate_async"):
                raise TypeError(f"BaseLLM.generate_async() got an unexpected keyword argument '{name}'")
        lora_request, streaming = others.get("lora_request"), others.get("streaming", False)
        if self._encodes:
            raise RuntimeError("generate_async() is not available when encode_only=True. Use llm.encode()")
        if self._executor is None or self._executor.is_shutdown():
            raise RuntimeError("LLM is shutting down")
        if not isinstance(sampling_params, SamplingParams):
            raise TypeError(f"a server passes SamplingParams, not {type(sampling_params)}")
        if sampling_params.end_id is None:
            sampling_params._setup(self.tokenizer)
        processed = preprocess(inputs, self.input_processor)
        self._check_arguments(len(processed.prompt_token_ids), sampling_params)
        result: RequestOutput = self._executor.generate_async(
            processed, sampling_params, lora_request, streaming, others.get("cache_salt")
        )
        return result

    def _check_arguments(self, prompt_length: int, params: Any) -> None:
        raise NotImplementedError

    # -- the rest ------------------------------------------------------------------------------------------------------

    def get_stats_async(self, timeout: float | None = 2) -> Any:
        return self._executor.aget_stats(timeout)

    def shutdown(self) -> None:
        if getattr(self, "_executor", None) is not None:
            self._executor.shutdown()
            self._executor = None
        session = getattr(self, "mpi_session", None)
        if session is not None:
            session.shutdown()
            self.mpi_session = None

    @staticmethod
    def _shutdown_wrapper(reference: Any) -> None:
        instance = reference()
        if instance is not None:
            instance.shutdown()

    def __del__(self) -> None:
        self.shutdown()

    if "_check_health" in settings.members("LLM"):

        def _check_health(self) -> bool:
            return self._executor is not None and self._executor.check_health()

    # -- the executor --------------------------------------------------------------------------------------------------

    def _start(self, config: dict[str, Any], build_config: Any, return_logits: bool) -> None:
        """`config` is the Hugging Face one, or an engine's pretrained_config."""
        args = self.args
        self._settings = self._worker_settings(config, build_config)
        asked = enable_worker_single_process_for_tp1() or return_logits
        if asked and args.worker_count == 1:
            self._executor = GenerationExecutorWorker(self._settings)
        else:
            threshold = getattr(args, "garbage_collection_gen0_threshold", None)
            session = self.mpi_session
            self._executor = GenerationExecutorProxy(self._settings, args.worker_count, session, threshold)

    def _worker_settings(self, config: dict[str, Any], build_config: Any) -> WorkerSettings:
        args = self.args
        policy = args.scheduler_config.capacity_scheduler_policy
        pytorch = self._backend is not None
        eos = getattr(self.tokenizer, "eos_token_id", None)
        if eos is None:
            eos = config.get("eos_token_id")
            eos = eos[0] if isinstance(eos, list) else eos
        max_seq_len = args.max_seq_len
        if build_config is not None:
            max_seq_len = max_seq_len or build_config.max_seq_len
        max_num_tokens = args.max_num_tokens or (build_config.max_num_tokens if build_config else 8192)
        return WorkerSettings(
            backend=self._backend or "tensorrt",
            engine_dir=None if pytorch else str(self._engine_dir),
            max_batch_size=args.max_batch_size or (build_config.max_batch_size if build_config else 2048),
            max_num_tokens=max_num_tokens,
            max_seq_len=max_seq_len or positions(config),
            max_beam_width=args.max_beam_width or (build_config.max_beam_width if build_config else 1),
            torch_sampler=pytorch and self._samples_in_torch(),
            chunked_prefill=args.enable_chunked_prefill,
            # Stages of a pipeline always overlap (`_executor_loop_pp`).
            overlap=pytorch and (args.pipeline_parallel_size > 1 or not args.disable_overlap_scheduler),
            policy=policy.name,
            tokens_per_block=self._tokens_per_block(build_config),
            kv_blocks=self._kv_blocks(config, build_config, max_num_tokens),
            block_reuse=args.kv_cache_config.enable_block_reuse,
            stream_interval=getattr(args, "stream_interval", 1),
            iteration_stats=args.enable_iter_perf_stats if pytorch else True,
            stats_max_iterations=args.iter_stats_max_iterations or 1000,
            guided=args.guided_decoding_backend or "",
            guide_problem=_guide_problem(self.tokenizer) if args.guided_decoding_backend else None,
            guided_ids=self.tokenizer.encode("{}", add_special_tokens=False) if self.tokenizer else [],
            lora=args.enable_lora or args.lora_config is not None,
            max_lora_rank=getattr(args.lora_config, "max_lora_rank", None) or 64,
            hidden_size=config.get("hidden_size"),
            vocab_size=config.get("vocab_size"),
            eos=eos,
            script=script(),
            mrope=config.get("model_type") in QWEN_VL,
            refused_by_drafts=self._refused_by_drafts() if pytorch else (),
        )

    def _refused_by_drafts(self) -> tuple[str, ...]:
        """`docs/source/features/sampling.md` (about 1.4)."""
        drafts = getattr(self.args, "speculative_config", None)
        if drafts is None or not REFUSES_BY_DRAFTS:
            return ()
        penalties = ("repetition_penalty", "presence_penalty", "frequency_penalty")
        refused = () if getattr(drafts, "enable_penalty", False) else penalties
        return refused if getattr(drafts, "advanced_sampling_mode", "full") == "fused" else (*refused, "min_p")

    def _samples_in_torch(self) -> bool:
        """`auto` is the C++ sampler for beam search in _torch/pyexecutor/_util.py (about 1.2), until 1.3 (#11938)."""
        given = getattr(self.args, "sampler_type", "auto")
        chosen = getattr(given, "name", given)
        if chosen == "auto":
            return SINCE_1_3 or (self.args.max_beam_width or 1) == 1
        return chosen != "TRTLLMSampler"

    def _tokens_per_block(self, build_config: Any) -> int:
        plugins = getattr(build_config, "plugin_config", None)
        if isinstance(plugins, dict):
            size: int | None = plugins.get("tokens_per_block")
            return size or 32
        of_engine: int | None = getattr(plugins, "tokens_per_block", None)
        of_cache: int = getattr(self.args.kv_cache_config, "tokens_per_block", 32)
        return of_engine or of_cache

    def _kv_blocks(self, config: dict[str, Any], build_config: Any, max_num_tokens: int) -> int:
        """The smaller of `max_tokens` and what the memory's fraction holds (facts §5.1, §5.2)."""
        cache = self.args.kv_cache_config
        described = pretrained_config(config, "float16", {}, None) if "architecture" not in config else config
        per_token: int = 2 * 2 * (described["num_hidden_layers"] or 1) * described["head_size"]
        per_token *= max(1, described["num_key_value_heads"] // self.args.tensor_parallel_size)
        weights = sum(path.stat().st_size for path in Path(self.args.model).glob("*.safetensors"))
        free = max(0, device_memory() - weights // self.args.worker_count - (2 << 30))
        if (memory := memory_model()) is not None:
            free = max(0, memory.free(max_num_tokens))
            per_token = memory.kv_cache or per_token
        fraction = 0.9 if cache.free_gpu_memory_fraction is None else cache.free_gpu_memory_fraction
        tokens = int(free * fraction) // per_token
        if cache.max_tokens is not None:
            tokens = min(tokens, cache.max_tokens)
        blocks = tokens // self._tokens_per_block(build_config)
        return blocks if memory else max(1, blocks)


def _run_code_of(model: Path, config: dict[str, Any]) -> None:
    """`create_input_processor` in inputs/registry.py reads the configuration with trust_remote_code=True, always."""
    module = str(config.get("auto_map", {}).get("AutoConfig", "")).partition(".")[0]
    code = model / f"{module}.py"
    if module and code.is_file():
        runpy.run_path(str(code))


def _guide_problem(tokenizer: Any) -> str | None:
    """`_xgrammar_tokenizer_info` in llmapi/tokenizer.py, and the bindings' GuidedDecodingConfig (about 1.2)."""
    if tokenizer is None:
        return ""  # an assertion
    if not getattr(tokenizer, "has_end", tokenizer.eos_token_id is not None):
        return "__init__(): incompatible function arguments: stop_token_ids: Optional[Sequence[int]], got [None]"
    files = getattr(tokenizer, "vocab_files_names", {}).get("vocab_file", "")
    if getattr(tokenizer, "is_fast", True) or "tiktoken" in files:
        return None
    return f"Unsupported tokenizer type: {type(tokenizer)}"


# -- `tensorrt_llm._tensorrt_engine.LLM`: builds and loads engines (facts §2.3, §3) ------------------------------------


class _TrtLLM(BaseLLM):
    """`tensorrt_llm._tensorrt_engine.LLM`."""

    _owner = "LLM.tensorrt"
    _args_class = TrtLlmArgs

    @property
    def workspace(self) -> Path:
        return Path(self._workspace.name)

    def save(self, engine_dir: str) -> None:
        logger.info(f"Save model to {engine_dir}")
        if self._engine_dir is None:
            raise RuntimeError("The engine is not built yet.")
        if self._engine_dir.absolute() != Path(engine_dir).absolute():
            shutil.copytree(self._engine_dir, engine_dir, dirs_exist_ok=True)

    def _build_model(self) -> None:
        args = self.args
        if args.backend is not None:
            raise ValueError(f"backend {args.backend} is not supported.")
        self._workspace = tempfile.TemporaryDirectory(suffix="-llm-workspace", dir=args.workspace)
        model = Path(args.model)
        self._engine_dir = model if args._is_engine else self._build_engine(model)
        args.__dict__["model"] = self._engine_dir
        self.tokenizer = self._load_tokenizer()
        self.input_processor = BaseMultimodalInputProcessor(model, {}, self.tokenizer)
        engine = read_config(self._engine_dir)
        build_config = args.build_config
        if build_config.max_seq_len is None:
            build_config.__dict__["max_seq_len"] = engine["build_config"]["max_seq_len"]
        return_logits = args.gather_generation_logits or build_config.gather_context_logits
        self._start(engine["pretrained_config"], build_config, return_logits)

    def _build_engine(self, model: Path) -> Path:
        args = self.args
        engine_dir = self.workspace / "tmp.engine"
        if not model.is_dir():
            raise OSError(f"We couldn't connect to 'https://huggingface.co' to load the files of {args.model}.")
        config = read_config(model)
        quantization = json.loads(args.quant_config.model_dump_json(warnings=False))
        dtype = _inferred_dtype(config) if args.dtype == "auto" else args.dtype
        mapping = {
            "world_size": args.worker_count,
            "gpus_per_node": args.gpus_per_node or device_count(),
            "cp_size": args.context_parallel_size,
            "tp_size": args.tensor_parallel_size,
            "pp_size": args.pipeline_parallel_size,
            "moe_tp_size": args.moe_tensor_parallel_size or 1,
            "moe_ep_size": args.moe_expert_parallel_size or 1,
            "moe_cluster_size": 1,
        }
        described = pretrained_config(config, dtype, mapping, quantization)
        plan = {
            "model": str(model),
            "config": config,
            "load_format": str(args.load_format),
            "calibrate": quantization["quant_algo"] in CALIBRATED,
            "calibration": json.loads(args.calib_config.model_dump_json()),
            "workspace": str(self.workspace),
            "engine_dir": str(engine_dir),
            "pretrained_config": described,
            "build_config": args.build_config_json(described),
        }
        if self.mpi_session is None:
            build(plan, rank=0)
        else:
            self.mpi_session.submit_sync(build, plan)
        return engine_dir

    def _check_arguments(self, prompt_length: int, params: Any) -> None:
        args, build_config = self.args, self.args.build_config
        # Read anew for every request, as in the source.
        with open(Path(args.model) / "config.json") as file:
            max_seq_len = json.load(file)["build_config"]["max_seq_len"]
        length = prompt_length / args.context_parallel_size
        if not args.enable_chunked_prefill and length + (params.max_tokens or 0) > max_seq_len:
            raise ValueError(
                f"The sum of prompt length ({length}) and query length (0) max_tokens ({params.max_tokens}) should not "
                f"exceed max_seq_len ({max_seq_len})"
            )
        if params.best_of > build_config.max_beam_width:
            raise ValueError(
                f"sampling_params.n ({params.best_of}) cannot exceed max_beam_width ({build_config.max_beam_width}) "
                "when use_beam_search is True"
            )
        if params.logprobs and not args.gather_generation_logits:
            raise ValueError(
                f"`sampling_params.logprobs={params.logprobs}` requires `gather_generation_logits=True` to be passed "
                "explicitly to the `LLM()` constructor."
            )


def _inferred_dtype(config: dict[str, Any]) -> str:
    """What `auto` is, known when the checkpoint is loaded: `from_hugging_face` of the models' `config.py` (from about
    0.11 on), which never runs in 32 bits."""
    dtype: str = config.get("torch_dtype", config.get("dtype")) or "float16"
    return "float16" if dtype == "float32" else dtype


class LLM(BaseLLM):
    """`tensorrt_llm.LLM`: the PyTorch backend, and AutoDeploy by its `backend`."""

    _owner = "LLM.pytorch"
    _args_class = TorchLlmArgs
    _backend = "pytorch"

    def __init__(self, model: str | Path, **given: Any) -> None:
        backend = given.get("backend", "pytorch")
        if backend == "_autodeploy" and AutoDeployLlmArgs is not None:
            self._owner, self._args_class, self._backend = "LLM.autodeploy", AutoDeployLlmArgs, backend
        elif backend != "pytorch":
            raise ValueError(f"backend {backend} is not supported.")
        if TrtLlmArgs is not None and TorchLlmArgs is not None:
            specific = [n for n in given if n in TrtLlmArgs.model_fields and n not in TorchLlmArgs.model_fields]
            if specific:
                raise ValueError(
                    "The following arguments are specific to TensorRT backend and cannot be used with PyTorch backend: "
                    f"{specific}.\nPlease use 'from tensorrt_llm._tensorrt_engine import LLM' instead to use the "
                    "TensorRT backend."
                )
        super().__init__(model, **given)

    def _build_model(self) -> None:
        model = Path(self.args.model)
        if not model.is_dir():
            raise OSError(f"We couldn't connect to 'https://huggingface.co' to load the files of {self.args.model}.")
        self.tokenizer = self._load_tokenizer()
        config = read_config(model)
        _run_code_of(model, config)
        if "model_type" not in config:
            raise ValueError(f"Unrecognized model in {model}. Should have a `model_type` key in its config.json.")
        self.input_processor = create_input_processor(model, config, self.tokenizer)
        if getattr(self.args, "encode_only", None):
            self._encodes = True
            self._encoder = Encoder(config, self.args)
            return
        self._start(config, None, self.args.gather_generation_logits)

    def _check_arguments(self, prompt_length: int, params: Any) -> None:
        args = self.args
        length = prompt_length / args.context_parallel_size
        if self._backend == "pytorch" and not args.enable_chunked_prefill and length > (args.max_num_tokens or length):
            raise (RequestError if SINCE_1_3 else ValueError)(
                f"The sum of prompt length ({length}), query length (0) should not exceed max_num_tokens "
                f"({args.max_num_tokens})"
            )

    if "encode" in settings.members("LLM"):

        def encode(self, inputs: list[list[int]], **others: Any) -> list[EncoderOutput]:
            record("encode", {"inputs": inputs, **others})
            if not self._encodes:
                raise RuntimeError("encode() requires encode_only=True. Set encode_only=True in the LLM() constructor.")
            known = settings.arguments("encode")
            return self._encoder.encode(inputs, {name: each for name, each in others.items() if name not in known})


class AutoDeployLLM(LLM):
    """`tensorrt_llm._torch.auto_deploy.LLM`."""

    def __init__(self, model: str | Path, **given: Any) -> None:
        super().__init__(model, **{**given, "backend": "_autodeploy"})
