"""`python -m tests.support.plain_uvicorn serve MODEL --port P --host H`: the application in uvicorn as it comes."""

from __future__ import annotations

import argparse

import uvicorn

from djl_trtllm import create_app


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("command", choices=["serve"])
    parser.add_argument("model")
    parser.add_argument("--port", type=int)
    parser.add_argument("--host")
    given = parser.parse_args()
    app = create_app(given.model, {"stream_write_timeout": 1}, wait_until_ready=True)
    uvicorn.run(app, host=given.host, port=given.port)


if __name__ == "__main__":
    main()
