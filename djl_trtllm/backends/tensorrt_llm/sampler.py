"""What the sampler of an installed TensorRT-LLM honours, and what it wants of a request.

There are two: the C++ sampler (of the engine backend; `TRTLLMSampler` on PyTorch, removed by #18232 in August 2026) and
`TorchSampler`, the PyTorch backend's own. Found in TensorRT-LLM's sources:

- `auto` is the C++ sampler for beam search (`_torch/pyexecutor/_util.py`, `instantiate_sampler`, about 1.2), and always
  TorchSampler from 1.3 on (#11938 of March 2026, #14487).
- TorchSampler silently ignores what it lacks. It got bad words, penalties, no_repeat_ngram_size and min_p in July 2026
  (#16052, #16485, #16594, #16590; until then #9442), and length_penalty, early_stopping and the diversity rate of beams
  with #16620.
- TorchSampler draws from one generator with the seed 42 for all requests. Seeds of requests came with #17172 (August
  2026) and `sampler/seed_manager.py`, which says that they are exact only for a request that is sampled alone, until
  FlashInfer reads one seed per row.
- On PyTorch every request must have `max_beam_width` beams: by an assert in the executor's loop, which ends it, in
  `executor_request_queue.py` (about 1.2.0rc3), by an error of the request in `py_executor.py` (`_validate_request`,
  #8433). Later versions take fewer (#16620), but the requests of one batch must still have the same number.
- Log-probabilities of beams: TorchSampler returns those of the chosen tokens only, and refuses a request whose
  `logprobs` is not 0 (`TorchSampler.validate_request`, #11584 of February 2026). The engine backend computes them from
  logits of the shape [tokens, vocabulary] (`compute_logprobs` in `executor/result.py`, about 1.2); those of beams have
  one dimension more, which raises in the thread of the results and ends the LLM.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from packaging.version import Version

from djl_trtllm.backends.tensorrt_llm.sampling import BEAM_FIELDS, FIELDS

_TORCH_SAMPLER_LACKS = frozenset(
    {"bad", "repetition_penalty", "presence_penalty", "frequency_penalty", "min_p", "no_repeat_ngram_size"}
)
_TORCH_SAMPLER_IS_WHOLE = Version("1.4.0rc0")
_TORCH_SAMPLER_HAS_BEAMS = Version("1.3.0rc0")
_SEED_MANAGER = "tensorrt_llm._torch.pyexecutor.sampler.seed_manager"


@dataclass(frozen=True)
class Sampler:
    fields: frozenset[str]
    """The fields of a request that it honours."""
    seeded: bool = True
    """Whether a request's seed decides its tokens."""
    beams: int = 0
    """Every request must have exactly this many beams; 0: as many as it asks for."""
    most_beams: int = 0
    """A request may have at most this many beams, where each says how many; 0: there are none, or `beams`."""
    beam_logprobs: int | None = None
    """`SamplingParams.logprobs` of a request with beams that wants log-probabilities; None: there are none."""


def find_sampler(version: str, backend: str, arguments: Mapping[str, Any], max_beam_width: int) -> Sampler:
    """The sampler of an LLM with these arguments (as plain data)."""
    chosen = arguments.get("sampler_type", "auto")
    name = chosen["name"] if isinstance(chosen, Mapping) else chosen
    release = Version(version)
    searches = (arguments.get("max_beam_width") or 1) > 1
    by_auto = name == "auto" and searches and release < _TORCH_SAMPLER_HAS_BEAMS
    is_cpp = backend == "tensorrt" or name == "TRTLLMSampler" or by_auto
    whole = is_cpp or release >= _TORCH_SAMPLER_IS_WHOLE
    seeded = is_cpp or takes_seeds()
    fields = FIELDS if whole else FIELDS - _TORCH_SAMPLER_LACKS
    fields = fields if seeded else fields - {"seed"}
    if max_beam_width == 1:
        return Sampler(fields, seeded)
    fields |= {"beam_width", *(BEAM_FIELDS if whole else ())}
    if backend == "tensorrt":
        return Sampler(fields, most_beams=max_beam_width)
    wants_none = not is_cpp and release >= _TORCH_SAMPLER_HAS_BEAMS
    return Sampler(fields, seeded, max_beam_width, beam_logprobs=0 if wants_none else 1)


def takes_seeds() -> bool:
    """Whether the installed TorchSampler has the module of requests' seeds. The LLM has imported what is above it."""
    try:
        return find_spec(_SEED_MANAGER) is not None
    except ImportError:
        return False
