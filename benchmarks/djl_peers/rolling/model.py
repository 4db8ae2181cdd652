"""DJL's own way in rolling batch mode: its base class, its input parser, its formatters; the tokens are scripted."""

import itertools
import time

from djl_python.input_parser import parse_input_with_formatter
from djl_python.outputs import Output
from djl_python.properties_manager.properties import Properties
from djl_python.request_io import Token
from djl_python.rolling_batch.rolling_batch import RollingBatch, stop_on_any_exception
from djl_python.utils import rolling_batch_inference

_TOKENS = ("the", " little", " red", " riding", " hood", " went", " into", " the", " dark", " wood")


class ScriptedRollingBatch(RollingBatch):
    """One token for every request per step, `steps_per_second` times a second."""

    def __init__(self, configs, steps_per_second):
        super().__init__(configs)
        self._period = 1 / steps_per_second if steps_per_second else 0.0
        self._next = time.perf_counter()
        self._left = {}

    def preprocess_requests(self, requests):
        raise NotImplementedError  # abstract in djl_python, and called by nobody where `inference` is our own

    @stop_on_any_exception
    def inference(self, new_requests):
        self.add_new_requests(new_requests)
        for request in new_requests:
            count = request.parameters["max_new_tokens"]
            self._left[request.id] = (count, itertools.cycle(_TOKENS))
        now = time.perf_counter()
        if now < self._next:
            time.sleep(self._next - now)
        self._next = max(now, self._next) + self._period
        for number, request in enumerate(self.active_requests):
            left, tokens = self._left[request.id]
            last = left == 1
            request.set_next_token(
                Token(number, next(tokens), -0.5), last_token=last, finish_reason="length" if last else None
            )
            self._left[request.id] = (left - 1, tokens)
            if last:
                del self._left[request.id]
        return self.postprocess_results()


_batch = None
_configs = None


def handle(inputs):
    global _batch, _configs
    if _batch is None:
        properties = inputs.get_properties()
        _configs = Properties(**properties)
        _batch = ScriptedRollingBatch(_configs, float(properties.get("steps_per_second", 0)))
    if inputs.is_empty():
        return None
    parsed = parse_input_with_formatter(inputs, configs=_configs, tokenizer=None, rolling_batch=_batch)
    return rolling_batch_inference(parsed, inputs, Output(), _batch)
