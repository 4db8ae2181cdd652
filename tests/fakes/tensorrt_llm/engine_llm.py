"""`tensorrt_llm._tensorrt_engine.LLM`: builds and loads engines (facts §2.3, §3)."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from . import engine_files
from .arguments import TrtLlmArgs
from .base_llm import BaseLLM
from .build import CALIBRATED, build, pretrained_config
from .logger import logger
from .settings import device_count
from .stored_formats import algorithm_of


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
        if args._format == engine_files.TLLM_ENGINE:
            self._engine_dir = model
        else:
            self._engine_dir = self._build_engine(model)
        args.__dict__["model"] = self._engine_dir
        self._tokenizer = self._load_tokenizer()
        engine = engine_files.read_config(self._engine_dir)
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
        config = engine_files.read_config(model)
        quantization = json.loads(args.quant_config.model_dump_json(warnings=False))
        prequantized = args._format == engine_files.HF and self._read_quantization(model, config, quantization)
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
        if args._format == engine_files.HF:
            described = pretrained_config(config, dtype, mapping, quantization)
        else:
            described = {**config, "mapping": mapping}
        plan = {
            "format": args._format,
            "model": str(model),
            "config": config,
            "load_format": str(args.load_format),
            "calibrate": quantization["quant_algo"] in CALIBRATED and not prequantized,
            "calibration": json.loads(args.calib_config.model_dump_json()),
            "workspace": str(self.workspace),
            "engine_dir": str(engine_dir),
            "pretrained_config": described,
            "build_config": args.build_config_json(described),
        }
        if self.mpi_session is None:
            self.llm_build_stats.build_steps_info = build(0, plan)
        else:
            self.llm_build_stats.build_steps_info = self.mpi_session.submit_sync(build, plan)[0]
        self.llm_build_stats.engine_dir = engine_dir
        return engine_dir

    def _read_quantization(self, model: Path, config: dict[str, Any], quantization: dict[str, Any]) -> bool:
        """Whether the checkpoint is quantised already; its algorithm goes into `quantization` (facts §3.4)."""
        file = model / "hf_quant_config.json"
        if file.exists():
            logger.info(f"Found {file}, pre-quantized checkpoint is used.")
            found = json.loads(file.read_text())["quantization"]
            algo = found.get("quant_algo")
            if algo is None:
                raise ValueError("Pre-quantized checkpoint must have quant_algo.")
            for key, value in (("quant_algo", algo), ("kv_cache_quant_algo", found.get("kv_cache_quant_algo"))):
                if quantization[key] not in (None, value) and value is not None:
                    raise ValueError(
                        f"Specified {key}={quantization[key]}, conflicting with {key}={value} from HF quant config."
                    )
                quantization[key] = value
            return True
        if config.get("quantization_config") is not None:
            quantization["quant_algo"] = algorithm_of(config["quantization_config"], self.args)
            return True
        return False

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
        which = "n" if params.n == params.best_of else "best_of"
        if params.use_beam_search and params.best_of > build_config.max_beam_width:
            raise ValueError(
                f"sampling_params.{which} ({params.best_of}) cannot exceed max_beam_width "
                f"({build_config.max_beam_width}) when use_beam_search is True"
            )
        max_batch_size = args.max_batch_size or build_config.max_batch_size
        if not params.use_beam_search and params.best_of > max_batch_size:
            raise ValueError(
                f"sampling_params.{which} ({params.best_of}) cannot exceed max_batch_size ({max_batch_size}) when "
                "use_beam_search is False"
            )
        if params.prompt_logprobs and not build_config.gather_context_logits:
            raise ValueError(
                f"`sampling_params's prompt_logprobs={params.prompt_logprobs}` requires `gather_context_logits=True` "
                "in the `BuildConfig` when constructing the LLM. Example: LLM(..., "
                "build_config=BuildConfig(gather_context_logits=True))."
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
