"""Running an engine: token ids in, token ids out, in a separate process.

Each loaded model has one engine process (`process`), so that the engine's GIL and crashes do not affect the server. The
server communicates with it through `client`, with the messages of `protocol`. An engine that would not survive a bad
guide has a gate before it (`guides`).
"""
