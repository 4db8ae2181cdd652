"""What faults cost: `python -m tests.faults` prints a table of failed requests, seconds to recover, /ping and memory.

A kind of fault is a row of the table in `kinds.py`. `test_faults.py` runs the short form of most: what
another test shows as well has none.
"""
