"""Compiling: checkpoint in, engine directory out.

A plan is derived from configuration, model files and machine. An engine directory carries a manifest that says what the
engine was made from: an engine that does not fit is refused before it is loaded, and a compiled one is found again in
the cache. Compilers run in subprocesses; nothing here imports torch or an engine.
"""
