#!/usr/bin/env python3
"""Compile a model ahead of time, with the arguments of DJL Serving's script of this name.

The images have it at /opt/djl/partition/trt_llm_partition.py, where existing commands call it. It does what
`djl-trtllm compile PROPERTIES_DIR OUT` does.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys

from djl_trtllm.errors import DjlTrtllmError
from djl_trtllm.service.model import compile_model


def _say(line: str) -> None:
    print(line, flush=True)


def main() -> int:
    # Both degrees are required there, and its tutorial leaves one out.
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--properties_dir", required=True, metavar="DIR", help="folder with a serving.properties")
    parser.add_argument("--trt_llm_model_repo", required=True, metavar="OUT", help="folder of the compiled engine")
    parser.add_argument("--model_path", help="the checkpoint, in place of option.model_id")
    parser.add_argument("--tensor_parallel_degree", help="in place of option.tensor_parallel_degree")
    parser.add_argument("--pipeline_parallel_degree", help="in place of option.pipeline_parallel_degree")
    given = parser.parse_args()
    options = {
        "option.model_id": given.model_path,
        "option.tensor_parallel_degree": given.tensor_parallel_degree,
        "option.pipeline_parallel_degree": given.pipeline_parallel_degree,
    }
    arguments = [f"{key}={value}" for key, value in options.items() if value is not None]
    logging.basicConfig(stream=sys.stdout, format="%(message)s", level=logging.INFO)
    try:
        engine = compile_model(given.properties_dir, given.trt_llm_model_repo, os.environ, _say, arguments)
    except DjlTrtllmError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    _say(f"compiled {engine}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
