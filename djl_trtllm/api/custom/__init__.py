"""The formatters of a model directory's own `model.py`, for LMI's requests and responses."""
