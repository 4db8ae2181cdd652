"""What faults cost: `python -m tests.faults` prints a table of failed requests, seconds to recover, /ping and memory.

A kind of fault is a file in `kinds/` with a `KIND`. `test_kinds.py` runs the short form of each.
"""
