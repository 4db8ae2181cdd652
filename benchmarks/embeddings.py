"""The throughput of embeddings over HTTP beside that of the same model in OpenVINO's own pipeline.

    .venv-test-all/bin/python -m benchmarks.embeddings [--model DIR] [--rounds 3]

Each round runs both, one after the other: `raw` is OpenVINO GenAI's TextEmbeddingPipeline in a process of its own,
which gets the texts in batches of `--batch`, in the order of their lengths, and `server` is `djl-trtllm serve`,
asked by `--clients` clients with `--texts` texts in each request. Without `--model` it is a random BERT of the size of
all-MiniLM-L6-v2.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx
import numpy as np

from djl_trtllm.service.model import open_source, prepare
from tests.support.encoders import write_encoder, write_modules
from tests.support.server import serving

MINI = {"hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 6, "num_attention_heads": 12}
WORDS = ("once", "there", "was", "a", "little", "girl", "who", "lived", "with", "her", "mother", "and", "met", "wolf")


def texts(count: int) -> list[str]:
    """Texts of log-normal lengths, about 70 words in the mean and 400 at most."""
    source = np.random.default_rng(7)
    lengths = np.clip(source.lognormal(4.0, 0.7, count), 4, 400).astype(int)
    return [" ".join(source.choice(WORDS, length)) for length in lengths]


RAW = """
import json, sys, time
from openvino_genai import TextEmbeddingPipeline
directory, batch = sys.argv[1], int(sys.argv[2])
config = TextEmbeddingPipeline.Config()
config.normalize, config.pooling_type = True, TextEmbeddingPipeline.PoolingType.MEAN
pipeline = TextEmbeddingPipeline(directory, "CPU", config, INFERENCE_PRECISION_HINT="f32")
print("ready", flush=True)
for line in sys.stdin:
    texts = sorted(json.loads(line), key=len)
    began = time.perf_counter()
    for at in range(0, len(texts), batch):
        pipeline.embed_documents(texts[at:at + batch])
    print(time.perf_counter() - began, flush=True)
"""


async def ask(url: str, given: list[str], clients: int, each: int) -> float:
    """Seconds until all texts have vectors."""
    waiting = [given[at : at + each] for at in range(0, len(given), each)]
    async with httpx.AsyncClient(base_url=url, timeout=600, trust_env=False) as client:

        async def one() -> None:
            while waiting:
                body = {"input": waiting.pop(), "encoding_format": "base64"}
                (await client.post("/v1/embeddings", json=body)).raise_for_status()

        began = time.perf_counter()
        await asyncio.gather(*(one() for _ in range(clients)))
        return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--count", type=int, default=512, help="texts of a run")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--texts", type=int, default=16, help="texts of a request")
    parser.add_argument("--batch", type=int, default=16, help="texts that the pipeline gets together")
    arguments = parser.parse_args()
    given = texts(arguments.count)
    with tempfile.TemporaryDirectory() as folder:
        model = arguments.model or write_modules(write_encoder(Path(folder) / "model", vocab_size=30_522, **MINI))
        os.environ.setdefault("DJL_CACHE_DIR", folder)
        engine = prepare(open_source(model, os.environ)).start.options["engine_dir"]
        # The pipeline has a tokenizer of its own.
        subprocess.run(
            [str(Path(sys.executable).with_name("convert_tokenizer")), str(model), "-o", engine],
            check=True,
            capture_output=True,
        )
        raw = subprocess.Popen(
            [sys.executable, "-c", RAW, engine, str(arguments.batch)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert raw.stdin is not None and raw.stdout is not None
        raw.stdout.readline()
        ratios = []
        with serving(model, DJL_CACHE_DIR=os.environ["DJL_CACHE_DIR"]) as server:
            print(f"{'round':>5} {'raw, texts/s':>14} {'server, texts/s':>16} {'ratio':>6}")
            for number in range(arguments.rounds + 1):
                raw.stdin.write(json.dumps(given) + "\n")
                raw.stdin.flush()
                alone = float(raw.stdout.readline())
                served = asyncio.run(ask(server.url, given, arguments.clients, arguments.texts))
                if not number:
                    continue  # the first round prepares shapes
                ratios.append(alone / served)
                rates = arguments.count / alone, arguments.count / served
                print(f"{number:>5} {rates[0]:>14.1f} {rates[1]:>16.1f} {ratios[-1]:>6.2f}", flush=True)
        raw.stdin.close()
        raw.wait()
        print(f"median ratio {statistics.median(ratios):.2f}")


if __name__ == "__main__":
    main()
