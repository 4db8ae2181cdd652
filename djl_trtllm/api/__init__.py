"""Dialects: the HTTP APIs that this package speaks.

`base` says what a dialect is, `registry` lists them, and each has a folder. The other modules are what dialects share.
"""
