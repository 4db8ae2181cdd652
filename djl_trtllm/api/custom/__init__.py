"""The formatters of a model directory's own model.py."""
