"""A request as TensorRT-LLM's SamplingParams, and what the sampler of an installed TensorRT-LLM honours of it.

For example, `min_new_tokens=4` is `SamplingParams(min_tokens=4)`, and every sampler honours it. A new request field
needs a row in `_ARGUMENTS` and a place in the list of each sampler that honours it; a field in no list is refused.
"""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from packaging.version import Version

from djl_trtllm.errors import InvalidRequestError
from djl_trtllm.executor.protocol import PENALTIES, Submit
from djl_trtllm.request import Sampling

_ARGUMENTS = {
    "min_new_tokens": "min_tokens",
    "repetition_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "min_p": "min_p",
    "no_repeat_ngram_size": "no_repeat_ngram_size",
    "ignore_eos": "ignore_eos",
}
"""Fields of `Sampling` and their arguments, left out while they have the neutral value."""

_SAMPLED = ("temperature", "top_k", "top_p", "seed")
"""Arguments of requests that sample. All are always passed: with one alone some versions decode greedily."""

_ALWAYS = frozenset(
    {"max_new_tokens", "min_new_tokens", "do_sample", "temperature", "top_k", "top_p", "ignore_eos", "stop_token_ids"}
)
"""Fields that every sampler of every version honours."""
_SINCE_JULY = frozenset(
    {"bad", "repetition_penalty", "presence_penalty", "frequency_penalty", "min_p", "no_repeat_ngram_size"}
)
"""Fields that the C++ sampler always honoured, and TorchSampler from 1.4 on."""
_BEAMS = frozenset({"length_penalty", "early_stopping", "beam_search_diversity_rate"})
"""Fields of requests with beams, honoured by the same samplers as `_SINCE_JULY`."""
_TORCH_SAMPLER_IS_WHOLE = Version("1.4.0rc0")
_TORCH_SAMPLER_HAS_BIASES = Version("1.1.0")
"""TorchSampler adds `embedding_bias` to the logits since #6464 (August 2025)."""
PYTORCH_SCORES_PROMPTS = Version("1.3.0rc11")
"""Log-probabilities of prompts come with the first response, from 1.2 on for PyTorch (#7580): an entry for each token
but the first, and one more. Until this version (#11235, #12499; Model-Optimizer #2066) these are the most likely tokens
only, and the prompt's own seldom is among them.

Tokens whose blocks are reused have none, without a word (Model-Optimizer #1577), so such requests reuse none. The last
response of a request that was aborted before its first token has no logits of the prompt: an assertion fails then in
the thread of all responses (`base_worker.py`, `_compute_pytorch_prompt_logprobs`), which loses other requests' too.
"""
PYTORCH_READS_TAGS = Version("1.2.0")
"""From this version on a structural tag is passed to xgrammar as it is; before, in its older form only."""
_TORCH_SAMPLER_HAS_BEAMS = Version("1.3.0rc0")
_SEED_MANAGER = "tensorrt_llm._torch.pyexecutor.sampler.seed_manager"
_NEUTRAL = Sampling()
_MOST_BIASES = 64


@dataclass(frozen=True)
class Sampler:
    """The fields and beams that a sampler honours: that in C++, or `TorchSampler`, the PyTorch backend's own.

    The one in C++ is the engine backend's, and `TRTLLMSampler` on PyTorch (removed by #18232 in August 2026). Found in
    TensorRT-LLM's sources:

    - `auto` is the C++ sampler for beam search (`_torch/pyexecutor/_util.py`, `instantiate_sampler`, about 1.2), and
      always TorchSampler from 1.3 on (#11938 of March 2026, #14487).
    - TorchSampler silently ignores what it lacks. It got bad words, penalties, no_repeat_ngram_size and min_p in July
      2026 (#16052, #16485, #16594, #16590; until then #9442), and length_penalty, early_stopping and the diversity rate
      of beams with #16620.
    - On PyTorch every request must have `max_beam_width` beams: by an assert in the executor's loop, which ends it, in
      `executor_request_queue.py` (about 1.2.0rc3), by an error of the request in `py_executor.py` (`_validate_request`,
      #8433). Later versions take fewer (#16620), but the requests of one batch must still have the same number.
    - Log-probabilities of beams: TorchSampler returns those of the chosen tokens only, and refuses a request whose
      `logprobs` is not 0 (`TorchSampler.validate_request`, #11584 of February 2026). The engine backend computes them
      from logits of the shape [tokens, vocabulary] (`compute_logprobs` in `executor/result.py`, about 1.2); those of
      beams have one dimension more, which raises in the thread of the results and ends the LLM.
    """

    fields: frozenset[str]
    """The fields of a request that the sampler honours."""
    seeded: bool = True
    """Whether a request's seed decides its tokens."""
    beams: int = 0
    """Every request must have exactly this many beams; 0: as many as it asks for."""
    most_beams: int = 0
    """A request may have at most this many beams, where each says how many; 0: there are none, or `beams`."""
    beam_logprobs: int | None = None
    """`SamplingParams.logprobs` of a request with beams that wants log-probabilities; None: there are none."""


def find_sampler(version: str, backend: str, arguments: Mapping[str, Any], max_beam_width: int) -> Sampler:
    """Return the sampler of an LLM with these arguments (as plain data)."""
    chosen = arguments.get("sampler_type", "auto")
    name = chosen["name"] if isinstance(chosen, Mapping) else chosen
    release = Version(version)
    searches = (arguments.get("max_beam_width") or 1) > 1
    by_auto = name == "auto" and searches and release < _TORCH_SAMPLER_HAS_BEAMS
    is_cpp = backend == "tensorrt" or name == "TRTLLMSampler" or by_auto
    whole = is_cpp or release >= _TORCH_SAMPLER_IS_WHOLE
    seeded = is_cpp or takes_seeds()
    fields = _ALWAYS | (_SINCE_JULY if whole else set()) | ({"seed"} if seeded else set())
    fields -= set() if is_cpp else _lost_to_drafts(arguments.get("speculative_config"))
    fields |= {"logit_bias"} if is_cpp or release >= _TORCH_SAMPLER_HAS_BIASES else set()
    if max_beam_width == 1:
        return Sampler(fields, seeded)
    fields |= {"beam_width", *(_BEAMS if whole else ())}
    if backend == "tensorrt":
        return Sampler(fields, most_beams=max_beam_width)
    wants_none = not is_cpp and release >= _TORCH_SAMPLER_HAS_BEAMS
    return Sampler(fields, seeded, max_beam_width, beam_logprobs=0 if wants_none else 1)


def _lost_to_drafts(speculation: Mapping[str, Any] | None) -> frozenset[str]:
    """The fields that TorchSampler does not honour beside this speculation.

    It refuses a request with a penalty or min_p unless the settings of the speculation have `enable_penalty` or
    `advanced_sampling_mode: fused` (`docs/source/features/sampling.md`@05ce57bc, about 1.4). The other ways of drafting
    were not read: with them, such requests count as refused, too.
    """
    if speculation is None:
        return frozenset()
    lost = frozenset() if speculation.get("enable_penalty") else PENALTIES
    return lost if speculation.get("advanced_sampling_mode") == "fused" else lost | {"min_p"}


def takes_seeds() -> bool:
    """Return whether the installed TorchSampler has the module of requests' seeds.

    Without it, all requests draw from one generator with the seed 42. It came with #17172 (August 2026), and says that
    seeds are exact only for a request that is sampled alone, until FlashInfer reads one seed per row. The LLM has
    imported the packages above it.
    """
    try:
        return find_spec(_SEED_MANAGER) is not None
    except ImportError:
        return False


def sampling_arguments(request: Submit, beam_logprobs: int | None = 1) -> dict[str, Any]:
    """Return the keyword arguments of SamplingParams, without the guide; a new dict for each request, which changes it.

    `max_tokens` is always passed: its default is 32, and the scheduler reserves KV cache for all of it. `beam_logprobs`
    is what the sampler wants for `logprobs` of beams (see `Sampler`); otherwise 0 means none.

    Found in TensorRT-LLM's `sampling_params.py` and `llmapi/llm.py` (about 1.2): without an `end_id` of its own a
    request goes through `SamplingParams._setup`, which takes the end and padding ids from the tokenizer and turns the
    strings of `stop` and `bad` into token ids. With an `end_id` that does not happen, and a string then raises. So
    `end_id` is never passed, the LLM has a tokenizer (`skip_tokenizer_init` stays off; guided decoding needs one too),
    and `detokenize` is off: the server makes the text. The tokenizer's end id is the only one the engine knows: the
    other end ids of generation_config.json are passed as stop ids. `ignore_eos` removes the end id, and from 1.3 on all
    stop words too (#10389 of January 2026, `base_worker.py`): the server ends such requests itself. A finished stop
    word is removed from the tokens unless `include_stop_str_in_output`; here it stays, because the server cuts stop
    strings.
    """
    sampling = request.sampling
    arguments: dict[str, Any] = {"max_tokens": sampling.max_new_tokens, "detokenize": False}
    if sampling.beam_width > 1:
        arguments |= _beams(sampling)
    elif sampling.do_sample:
        arguments |= {name: getattr(sampling, name) for name in _SAMPLED}
    for name, argument in _ARGUMENTS.items():
        value = getattr(sampling, name)
        if value != getattr(_NEUTRAL, name):
            arguments[argument] = value
    if request.logprobs:
        arguments["logprobs"] = max(1, request.top_logprobs) if sampling.beam_width == 1 else beam_logprobs
    if request.stop_token_ids:
        arguments["stop_token_ids"] = list(request.stop_token_ids)
    if request.stop:
        arguments["stop"] = list(request.stop)
    if request.stop or request.stop_token_ids:
        arguments["include_stop_str_in_output"] = True
    if request.bad:
        arguments["bad"] = list(request.bad)
    if request.prompt_logprobs is not None:
        arguments["prompt_logprobs"] = max(1, request.prompt_logprobs)
    return arguments


class Biases:
    """`logit_bias` as tensors: one for each map that requests have, kept until several others have come.

    TorchSampler stacks the tensors of all requests anew in each iteration (#17436): this saves the making of them only.
    """

    def __init__(self, vocabulary: int) -> None:
        self._vocabulary = vocabulary
        self._made: OrderedDict[tuple[tuple[int, float], ...], Any] = OrderedDict()

    def tensor(self, bias: tuple[tuple[int, float], ...]) -> Any:
        """Return the tensor of a map. Raises InvalidRequestError for a token that the model does not have."""
        found = self._made.get(bias)
        if found is None:
            if (highest := bias[-1][0]) >= self._vocabulary:
                raise InvalidRequestError(
                    f"'logit_bias' has token {highest}: the model's tokens end at {self._vocabulary - 1}"
                )
            torch = import_module("torch")
            found = self._made[bias] = torch.zeros(self._vocabulary, dtype=torch.float32)
            found[[token for token, _ in bias]] = torch.tensor([weight for _, weight in bias])
            while len(self._made) > _MOST_BIASES:
                self._made.popitem(last=False)
        self._made.move_to_end(bias)
        return found


def _beams(sampling: Sampling) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "use_beam_search": True,
        "best_of": sampling.beam_width,
        "n": sampling.beam_width,
        # TensorRT-LLM's own defaults differ: 0 and 1.
        "length_penalty": sampling.length_penalty,
        "early_stopping": int(sampling.early_stopping),
    }
    if sampling.beam_search_diversity_rate:
        arguments["beam_search_diversity_rate"] = sampling.beam_search_diversity_rate
    return arguments
