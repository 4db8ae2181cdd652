"""A request in TensorRT-LLM: its prompt where the model takes images, and the steps of its result as columns."""

from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from djl_trtllm.backends.tensorrt_llm.names import has
from djl_trtllm.errors import InvalidRequestError
from djl_trtllm.executor import images
from djl_trtllm.executor.protocol import Logprob, Ranked, Refusal, Submit
from djl_trtllm.model.vision import content_name
from djl_trtllm.request import FinishReason

if TYPE_CHECKING:
    from djl_trtllm.executor.process import StepBuffer

_FINISH = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "cancelled": FinishReason.CANCELLED}


class Heartbeat:
    """The engine's signs of life so far: responses and iteration statistics."""

    def __init__(self) -> None:
        self.responses = 0
        self.iterations = 0

    @property
    def beats(self) -> int:
        return self.responses + self.iterations


class RunningRequest:
    """Reads the steps of one request's result. With beams it is several sequences, delivered when all have ended.

    `message` is the request, `end_id` the tokenizer's end token. `ended` is called after the last response, or with the
    error that reading one raised.

    Found in TensorRT-LLM's `executor/result.py` (about 1.2): one object per request, which every step of its iteration
    changes and returns again, one step per response of the engine; `token_ids` and `logprobs` grow (before 1.2 the
    engine backend's `logprobs` are those of the last response only). A request's own failure is raised by the step as
    RequestError. The reason of the end comes with the last step: `stop` for the end id, which the engine backend leaves
    out of the tokens, and for stop words, with the word as `stop_reason`.

    Found in `llmapi/utils.py` (1.0 to 1.4): the thread that receives an iteration's responses puts each into the queue
    of its result, and then calls `notify` of all these queues on the event loop. By itself that sets an event, which
    wakes a task, for every response; and a step of the result costs more than all else that is done for a token. So
    `notify` is replaced by a reader, which takes what is in the queue without a task, and reads the tokens of plain
    responses itself. The result reads the others: the first and the last one, errors, log-probabilities, beams.
    """

    def __init__(
        self,
        message: Submit,
        step_buffer: "StepBuffer",
        heartbeat: Heartbeat,
        end_id: int | None,
        ended: Callable[["RunningRequest", Exception | None], None],
    ) -> None:
        self.message = message
        self.result: Any
        """TensorRT-LLM's future of this request."""
        self.muted = False
        """Whether the request was cancelled: its later output is not sent."""
        self.speculates = False
        """Whether drafts propose tokens of this request."""
        self.responded = False
        """Whether the engine has sent a response for this request."""
        self.aborted_for: float | None = None
        """Seconds since the request was aborted in the engine; None if it was not."""
        self.aborted_after = 0
        """The engine's responses to all requests until this one was aborted."""
        self._step_buffer = step_buffer
        self._heartbeat = heartbeat
        self._end_id = end_id
        self._ended = ended
        self._streams = message.sampling.beam_width == 1
        self._notify: Callable[[], None]
        self._output: Any
        """TensorRT-LLM's output of its one sequence, without beams."""
        self._over = False
        """Whether the ends of its sequences were sent."""
        self._seen = 0
        """The number of tokens that were put into steps so far."""

    def follow(self, result: Any) -> None:
        """Put the output of `result` into the step_buffer as it comes, with the ends."""
        self.result = result
        self._output = result.outputs[0]
        self._notify = result.aqueue.notify
        result.aqueue.notify = self._read

    def leave(self) -> None:
        """Read no more responses."""
        self.result.aqueue.notify = self._notify

    def end(self, finish: FinishReason, error: str | Refusal | None = None) -> None:
        """End all its sequences."""
        self._over = True
        for request_id in sequence_ids(self.message):
            self._end(request_id, finish, error)

    def _read(self) -> None:
        """Take the responses that have come."""
        self._notify()  # before 1.2 `get` waits for the event, also where there is a response
        queue, last, problem = self.result.aqueue, False, None
        try:
            while not (last or queue.empty()):
                self._heartbeat.responses += 1
                self.responded = True
                last = self._take(_without_waiting(queue.get()))
            if not self._over:
                self._put_in(last)
        except Exception as error:
            problem = error
        if problem is not None or last:
            self.leave()
            self._ended(self, problem)

    def _take(self, response: Any) -> bool:
        """Take a response. Returns whether it is the last one."""
        if self.muted and self.message.logprobs and _is_last(response):
            # PyTorch's has no `cum_log_probs` where there is no token yet: the result would raise, and log a trace.
            return True
        tokens = _plain_tokens(response) if self._seen and not self.message.logprobs else None
        if tokens is not None:
            self._output.token_ids.extend(tokens)
            return False
        self.result._handle_response(response)
        if self.message.logprobs and self._streams and not self._over:
            self.collect()  # before the next response takes them away
        return bool(self.result.finished)

    def _put_in(self, last: bool) -> None:
        """Put the tokens of the responses into the step buffer, and the end after the last one."""
        if self._streams:
            self.collect()
        if not last:
            return
        if self.speculates and self._streams:
            accepted = max(0, self._seen - self.result.decoding_iter)
            self._step_buffer.step.accepted[self.message.request_id] = accepted
        sequences = list(zip(sequence_ids(self.message), self.result.outputs, strict=True))
        if not self._streams and not self.muted:
            # All are read before the first one ends: what a later one raises ends them all.
            for request_id, output in sequences:
                # Not every version gives a beam's log-probabilities.
                wants_logprobs = self.message.logprobs and output.logprobs
                logprobs = _chosen(output.logprobs, output.token_ids) if wants_logprobs else None
                self._step_buffer.step.add(request_id, output.token_ids, logprobs)
        self._over = True
        for request_id, output in sequences:
            self._finish(request_id, output)

    def collect(self) -> None:
        """Put in the tokens since the last call, once for all responses of a wake-up."""
        output = self._output
        token_ids, seen = output.token_ids, self._seen
        if self.muted or len(token_ids) <= seen:
            return
        request, new = self.message, token_ids[seen:]
        logprobs = _chosen(output.logprobs, new, request.top_logprobs) if request.logprobs else None
        step = self._step_buffer.step
        if not seen and request.prompt_logprobs is not None:
            step.prompts[request.request_id] = _scores(output.prompt_logprobs, request)
        step.add(request.request_id, new, logprobs)
        if not seen and (cached := getattr(self.result, "cached_tokens", 0)):
            step.cached[request.request_id] = cached
        self._seen = len(token_ids)

    def _finish(self, request_id: int, output: Any) -> None:
        finish = FinishReason.CANCELLED if self.muted else _FINISH.get(output.finish_reason)
        if finish is None:
            self._end(request_id, FinishReason.ERROR, f"TensorRT-LLM ended the request with {output.finish_reason!r}")
            return
        if finish is FinishReason.STOP:
            self._restore_end(request_id, output)
        self._end(request_id, finish, drafted=_drafted(output) if self.speculates else None)

    def _restore_end(self, request_id: int, output: Any) -> None:
        """Add the id that ended a sequence as its last token, where TensorRT-LLM leaves it out."""
        ended_by = self._end_id if output.stop_reason is None else output.stop_reason
        ends = {*self.message.stop_token_ids, self._end_id}
        if isinstance(ended_by, int) and not (output.token_ids and output.token_ids[-1] in ends):
            self._step_buffer.step.add(request_id, [ended_by])

    def _end(
        self, request_id: int, finish: FinishReason, error: str | Refusal | None = None, drafted: int | None = None
    ) -> None:
        self._step_buffer.step.end(request_id, finish, error, drafted)


def _drafted(output: Any) -> int | None:
    """The tokens that drafts proposed for an output; None where TensorRT-LLM has no such figure.

    The C++ runtime and sampler count them. PyTorch's own sampler does so since #17082 (July 2026); before, the number
    is 0 for all requests.
    """
    figures = getattr(output.request_perf_metrics, "speculative_decoding", None)
    return getattr(figures, "total_draft_tokens", None) or None


def _without_waiting(get: Coroutine[Any, Any, Any]) -> Any:
    """Return what `get` returns. Raises RuntimeError if it waits: something is in its queue."""
    try:
        get.send(None)
    except StopIteration as returned:
        return returned.value
    get.close()
    raise RuntimeError("TensorRT-LLM's queue waits though it has a response")


def _is_last(response: Any) -> bool:
    return hasattr(response, "has_error") and not response.has_error() and response.result.is_final


def _plain_tokens(response: Any) -> list[int] | None:
    """The new tokens of a response that has nothing else; None for others, which the result has to read.

    Found in `GenerationResultBase._handle_response` (1.0 to 1.4); PyTorch's results arrive serialised.
    """
    if not hasattr(response, "has_error") or response.has_error() or response.result.is_final:
        return None
    result = response.result
    if isinstance(getattr(result, "_result", None), bytes):
        result.deserialize()
    tokens: list[int] = result.output_token_ids[0]
    return tokens


def sequence_ids(message: Submit) -> range:
    """Return the ids of a request's sequences, one per beam."""
    return range(message.request_id, message.request_id + message.sampling.beam_width)


def _scores(entries: Sequence[Any] | None, message: Submit) -> list[Logprob]:
    """The log-probabilities of a prompt. Raises ValueError where TensorRT-LLM does not give one for each token."""
    following = message.prompt_ids[1:]
    scores = _chosen((entries or ())[: len(following)], following, message.prompt_logprobs or 0) if following else []
    if any((score.logprob if isinstance(score, Ranked) else score) is None for score in scores):
        raise ValueError("TensorRT-LLM gave no log-probabilities of the prompt's own tokens")
    return [None, *scores]


def _chosen(entries: Sequence[Any], new: Sequence[int], most: int = 0) -> list[Logprob]:
    """The log-probabilities of the last tokens: TensorRT-LLM gives each alone, or in a dict of the likeliest.

    `most`: how many of the likeliest to return with each.

    A sampled token need not be among the likeliest (PyTorch backend of about 1.2: TorchSampler takes them by
    `torch.topk`). It has None then.
    """
    if len(entries) < len(new):
        raise ValueError(f"TensorRT-LLM gave {len(entries)} log-probabilities for {len(new)} tokens")
    pairs = zip(entries[-len(new) :], new, strict=True)
    if most:
        return [_ranked(entry, token_id, most) for entry, token_id in pairs]
    return [_logprob(entry, token_id) for entry, token_id in pairs]


def _logprob(entry: Any, token_id: int) -> float | None:
    if not isinstance(entry, dict):
        return float(entry)
    found = entry.get(token_id)
    return None if found is None else float(found.logprob)


def _ranked(entry: Any, token_id: int, most: int) -> Ranked:
    """Return at most `most` of the likeliest: with the sampled token TensorRT-LLM may give one more."""
    found = entry.items() if isinstance(entry, dict) else ()
    likeliest = sorted(((float(each.logprob), id_) for id_, each in found), key=lambda pair: -pair[0])[:most]
    return Ranked(_logprob(entry, token_id), [id_ for _, id_ in likeliest], [logprob for logprob, _ in likeliest])


# -- prompts of models that take images --------------------------------------------------------------------------------


class ImagePrompts(images.ImagePrompts):
    """Prompts for `llm`, TensorRT-LLM's LLM of this `version`, which gets all of them as text, as from its own server.

    Its processor of images makes ids and pixels of a text (`call_with_text_prompt` in
    `_torch/models/modeling_qwen2vl.py`, 1.2 to 1.4), and turns ids into text before that. It also gives each token the
    position that the model's rotary embedding reads. A prompt of ids without images has no such positions, and beside
    others in a batch it gives those of one request to another (TensorRT-LLM #16944, merged for 1.4). So it comes as
    text, too.

    Blocks of the KV cache have the ids of their tokens, which are the same for all images, the images' hashes, and a
    salt. From the first request with images on, `multimodal_hashing_supported` says whether there are hashes. Until
    June 2026 they are of pixels without the image's size (#14603). Names of images, which go into the hashes, came with
    1.3.
    """

    def __init__(self, directory: Path, llm: Any, version: str) -> None:
        super().__init__(directory)
        self._llm = llm
        self._named = has("TextPrompt", "multi_modal_uuids", version)

    def prompt(self, request: Submit, pictures: list[Any]) -> dict[str, Any]:
        """The prompt with what `pictures` has read, as `generate_async` takes it."""
        plain = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
        prompt: dict[str, Any] = {"prompt": self._llm.tokenizer.decode(self.collapsed(request), **plain)}
        if request.images:
            prompt["multi_modal_data"] = {"image": pictures}
            if self._named:
                prompt["multi_modal_uuids"] = {"image": self.names(request)}
        return prompt

    def salt(self, request: Submit) -> str:
        """The salt of a prompt: of its images too, unless TensorRT-LLM is known to hash their names."""
        hashed = getattr(self._llm.input_processor, "multimodal_hashing_supported", None)
        if not request.images or (self._named and hashed):
            return request.cache_salt
        return content_name("".join(self.names(request)).encode(), request.cache_salt)

    def check(self, request: Submit, given: list[int]) -> None:
        """Raise InvalidRequestError if TensorRT-LLM has made other tokens of the prompt than the server has counted.

        Before 1.4 the tokens of images are an id beyond the vocabulary.
        """
        placeholder, expected = self.vision.placeholder, request.prompt_ids
        if len(given) != len(expected) or any(
            theirs != ours for theirs, ours in zip(given, expected, strict=True) if ours != placeholder
        ):
            raise InvalidRequestError(
                "the prompt's tokens are not those of a text, and TensorRT-LLM takes the prompts of models with "
                "images as text: send messages or a text"
            )
