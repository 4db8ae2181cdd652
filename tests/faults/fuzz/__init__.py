"""Requests of every dialect, and archives, made by a grammar and then damaged: `python -m tests.faults.fuzz`.

No response is a 500, none is missing, and nothing of them is left. The short form is `tests/faults/test_fuzz.py`.
"""
