"""Running: token ids in, token ids out, in a process of its own.

The engine lives in the executor host (`host`), one spawned process per loaded model. It holds the GIL, the GPU and
the crashes to itself; the server talks to it through `client` with the messages of `protocol`.
"""
