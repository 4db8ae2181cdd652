"""Log-probabilities of prompts, by the model itself beside the pipeline."""

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov

from djl_trtllm.backends.openvino.compile import MODEL_XML
from djl_trtllm.executor.protocol import Logprob, Ranked, Submit

_MOST_LOGITS = 2**22
_MOST_TOKENS = 256
"""The most logits, and tokens, of a piece of a prompt."""
_OF_THE_PIPELINE = frozenset({"KV_CACHE_PRECISION"})


class PromptScorer:
    """Scores one prompt after the other. It is true while any is held.

    The pipeline's own log-probabilities (`echo`) are those of the chosen tokens only, are lost where a prompt's
    beginning comes from the prefix cache, and are wrong for a request that is not the first of its batch
    (openvino-genai 2026.4, `_fill_prompt_log_probs`). So the model is compiled a second time, for the first prompt that
    wants them, and takes a piece of a prompt in each iteration of the engine, so that the sequences of the pipeline go
    on meanwhile.
    """

    def __init__(self, engine_dir: Path, properties: dict[str, Any], vocabulary: int) -> None:
        self._xml = engine_dir / MODEL_XML
        self._properties = {name: value for name, value in properties.items() if name not in _OF_THE_PIPELINE}
        self._piece = max(1, min(_MOST_TOKENS, _MOST_LOGITS // vocabulary))
        self._held: deque[Submit] = deque()
        self._scores: list[Logprob] = [None]
        self._threads = ThreadPoolExecutor(1, "prompt-scorer")
        self._model: Future[ov.InferRequest] | None = None

    def __bool__(self) -> bool:
        return bool(self._held)

    def hold(self, request: Submit) -> None:
        self._held.append(request)

    def cancel(self, request_id: int) -> bool:
        """Give a request up. Returns False if it is not held."""
        found = next((each for each in self._held if each.request_id == request_id), None)
        if found is None:
            return False
        if found is self._held[0]:
            self._scores = [None]
        self._held.remove(found)
        return True

    def give_up(self) -> Submit:
        """Return the request for which `advance` has raised, and drop it. The model is loaded anew."""
        self._model, self._scores = None, [None]
        return self._held.popleft()

    def advance(self, patience: float) -> tuple[Submit, list[Logprob]] | None:
        """Score the next piece; returns the request whose prompt it completes, and the scores of all its tokens.

        Waits at most `patience` seconds for the model, which other sequences do not wait for. Raises what OpenVINO
        raises where it cannot be loaded or run; `give_up` has to follow.
        """
        if self._model is None:
            self._model = self._threads.submit(self._load)
        if not wait([self._model], patience).done:
            return None
        request = self._held[0]
        ids, begin = request.prompt_ids, len(self._scores) - 1
        end = min(begin + self._piece, len(ids) - 1)
        if end > begin:
            logits = _infer(self._model.result(), ids[begin:end], begin)
            self._scores += _ranked(logits, np.array(ids[begin + 1 : end + 1]), request.prompt_logprobs or 0)
        if end < len(ids) - 1:
            return None
        scores, self._scores = self._scores, [None]
        return self._held.popleft(), scores

    def _load(self) -> ov.InferRequest:
        return ov.Core().compile_model(self._xml, "CPU", self._properties).create_infer_request()


def _infer(model: ov.InferRequest, ids: Sequence[int], begin: int) -> np.ndarray[Any, Any]:
    """The logits after each of these tokens, which follow `begin` others."""
    if begin == 0:
        model.reset_state()
    end = begin + len(ids)
    inputs = {
        "input_ids": np.array([ids], np.int64),
        "attention_mask": np.ones((1, end), np.int64),
        "position_ids": np.arange(begin, end, dtype=np.int64)[None],
        "beam_idx": np.zeros(1, np.int32),
    }
    taken = {name for port in model.model_inputs for name in port.names}
    model.infer({name: value for name, value in inputs.items() if name in taken}, share_inputs=True)
    found: np.ndarray[Any, Any] = model.get_tensor("logits").data[0]
    return found


def _ranked(logits: np.ndarray[Any, Any], chosen: np.ndarray[Any, Any], most: int) -> list[Logprob]:
    """The log-probability of each row's chosen token, with as many of the most likely ones."""
    rows, most = np.arange(len(chosen)), min(most, logits.shape[1])
    highest = logits.max(axis=1, keepdims=True)
    norm = highest[:, 0] + np.log(np.exp(logits - highest).sum(axis=1))
    own: list[float] = (logits[rows, chosen] - norm).tolist()
    if not most:
        return [*own]
    top = np.argpartition(logits, -most, axis=1)[:, -most:]
    top = np.take_along_axis(top, np.argsort(-np.take_along_axis(logits, top, axis=1), axis=1, kind="stable"), axis=1)
    values = np.take_along_axis(logits, top, axis=1) - norm[:, None]
    return [Ranked(*each) for each in zip(own, top.tolist(), values.tolist(), strict=True)]
