"""`tensorrt_llm.LLM`: the PyTorch backend, and AutoDeploy (facts §1.3, §2.4)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from . import engine_files
from .arguments import AutoDeployLlmArgs, TorchLlmArgs, TrtLlmArgs
from .base_llm import BaseLLM
from .errors import RequestError
from .settings import SINCE_1_3
from .stored_formats import algorithm_of


class LLM(BaseLLM):
    """`tensorrt_llm.LLM`: the PyTorch backend, and AutoDeploy by its `backend`."""

    _owner = "LLM.pytorch"
    _args_class = TorchLlmArgs
    _backend = "pytorch"

    def __init__(self, model: str | Path, *positional: Any, **kwargs: Any) -> None:
        backend = kwargs.get("backend", "pytorch")
        if backend == "_autodeploy" and AutoDeployLlmArgs is not None:
            self._owner, self._args_class, self._backend = "LLM.autodeploy", AutoDeployLlmArgs, backend
        elif backend != "pytorch":
            raise ValueError(f"backend {backend} is not supported.")
        if TrtLlmArgs is not None and TorchLlmArgs is not None:
            specific = [n for n in kwargs if n in TrtLlmArgs.model_fields and n not in TorchLlmArgs.model_fields]
            if specific:
                raise ValueError(
                    "The following arguments are specific to TensorRT backend and cannot be used with PyTorch backend: "
                    f"{specific}.\nPlease use 'from tensorrt_llm._tensorrt_engine import LLM' instead to use the "
                    "TensorRT backend."
                )
        super().__init__(model, *positional, **kwargs)

    def _build_model(self) -> None:
        model = Path(self.args.model)
        if not model.is_dir():
            raise OSError(f"We couldn't connect to 'https://huggingface.co' to load the files of {self.args.model}.")
        self._tokenizer = self._load_tokenizer()
        config = engine_files.read_config(model)
        if "model_type" not in config:
            raise ValueError(f"Unrecognized model in {model}. Should have a `model_type` key in its config.json.")
        stored = config.get("quantization_config")
        if stored is not None and not (model / "hf_quant_config.json").exists():
            algorithm_of(stored, self.args)
        self._start(config, None, self.args.gather_generation_logits)

    def _check_arguments(self, prompt_length: int, params: Any) -> None:
        args = self.args
        length = prompt_length / args.context_parallel_size
        if self._backend == "pytorch" and not args.enable_chunked_prefill and length > (args.max_num_tokens or length):
            raise (RequestError if SINCE_1_3 else ValueError)(
                f"The sum of prompt length ({length}), query length (0) should not exceed max_num_tokens "
                f"({args.max_num_tokens})"
            )


class AutoDeployLLM(LLM):
    """`tensorrt_llm._torch.auto_deploy.LLM`."""

    def __init__(self, model: str | Path, *positional: Any, **kwargs: Any) -> None:
        super().__init__(model, *positional, **{**kwargs, "backend": "_autodeploy"})
