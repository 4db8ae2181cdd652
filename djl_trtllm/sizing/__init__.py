"""How much memory a model takes and what fits beside it: computed from headers and tables, without a GPU.

Nothing here imports torch or an engine, and no weights are read.
"""
