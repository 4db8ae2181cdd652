"""`LLM`: offline batches in Python, under the names of TensorRT-LLM's LLM API."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing, nullcontext
from pathlib import Path
from types import TracebackType
from typing import Any, TypeAlias

import msgspec
from rich.console import Console

from djl_trtllm.api.messages import read_messages
from djl_trtllm.api.parameters import Problems
from djl_trtllm.errors import InvalidRequestError
from djl_trtllm.offline.options import open_offline_model
from djl_trtllm.offline.outputs import RequestOutput
from djl_trtllm.offline.progress import batch_progress
from djl_trtllm.offline.runner import Runner
from djl_trtllm.offline.sampling import SamplingParams
from djl_trtllm.request import GenerationRequest

PromptInput: TypeAlias = str | Sequence[int] | Sequence[Mapping[str, Any]]
"""Text, token ids, or the messages of a chat."""


class LLM:
    """A model, loaded for offline batches.

    `model` is what `djl-trtllm serve` takes: a directory, an archive, a model of the hub or in S3. Keyword
    arguments are options of docs/options.md without `option.`, in any of their spellings (`tensor_parallel_size`
    for `tensor_parallel_degree`), or TensorRT-LLM's configuration objects (`kv_cache_config=KvCacheConfig(...)`). They
    win over the model's serving.properties and the environment.

    The engine runs in a process of its own, which ends with `close`, with the `with` block, when the object is
    collected and when this process ends, however that comes. Methods may be called from any thread.
    """

    def __init__(self, model: str | Path, **options: Any) -> None:
        """Load a model; compiles it first if it has to be. Raises DjlTrtllmError: ConfigError, ModelError, ..."""
        prepared = open_offline_model(model, options)
        self._runner = Runner(prepared)
        self._vocab_size = prepared.tokenizer.vocab_size
        self._end = weakref.finalize(self, self._runner.close)

    def generate(
        self,
        prompts: str | Iterable[PromptInput],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Continue every prompt; the outputs have the order of the prompts.

        A prompt is a text, a list of token ids or a list of chat messages; a single text is a batch of one.
        `sampling_params` are for all prompts, or one for each; without them TensorRT-LLM's defaults count: greedy, 32
        tokens. `use_tqdm` shows the progress on stderr (the name is TensorRT-LLM's).

        A prompt that fails has its `RequestOutput.error`, and costs no other prompt its output. Raises
        InvalidRequestError before anything runs for what is no prompt, NotReadyError after `close`, and ExecutorError
        once the engine has failed for good.
        """
        prompts = [prompts] if isinstance(prompts, str) else list(prompts)
        params = _one_each(sampling_params, len(prompts))
        # A template is parsed once, however many prompts share it.
        templates = {id(each): each.template() for each in params}
        requests = [
            self._request(number, prompt, templates[id(each)])
            for number, (prompt, each) in enumerate(zip(prompts, params, strict=True))
        ]
        outputs: list[RequestOutput] = []
        results = self._runner.run(requests, wants_prompt_tokens=True)
        total, console = len(requests), Console(stderr=True)
        shown = batch_progress(total, lambda: self._runner.generated_tokens, console) if use_tqdm else nullcontext()
        with closing(results), shown as advance:
            for result in results:
                outputs.append(RequestOutput.of(result, requests[result.number]))
                if advance is not None:
                    advance()
        return outputs

    def close(self) -> None:
        """End the engine's process. What still runs in other threads fails."""
        self._end()

    shutdown = close
    """TensorRT-LLM's name."""

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _request(self, number: int, prompt: PromptInput, template: GenerationRequest) -> GenerationRequest:
        if isinstance(prompt, str):
            return msgspec.structs.replace(template, prompt=prompt)
        items = list(prompt) if isinstance(prompt, Sequence) and not isinstance(prompt, bytes) else None
        if items is not None and all(type(item) is int for item in items):
            self._check_ids(number, items)
            return msgspec.structs.replace(template, prompt_ids=items)
        if items is not None and all(isinstance(item, Mapping) for item in items):
            problems = Problems()
            messages = read_messages(items, problems)
            problems.raise_any(f"prompts[{number}]: ")
            return msgspec.structs.replace(template, messages=messages)
        raise InvalidRequestError(
            f"prompts[{number}] is {prompt!r:.80}: expected a text, a list of token ids or a list of chat messages "
            "(a single such list is a batch of one: [list])"
        )

    def _check_ids(self, number: int, ids: list[Any]) -> None:
        wrong = next((id_ for id_ in ids if not 0 <= id_ < self._vocab_size), None)
        if wrong is not None:
            raise InvalidRequestError(
                f"prompts[{number}] has the token id {wrong}: the tokenizer knows 0 to {self._vocab_size - 1}"
            )


def _one_each(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> Sequence[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise InvalidRequestError(f"there are {count} prompts and {len(params)} sampling_params: give one, or one each")
    return params
