"""Measures the largest `max_num_tokens` of a model: builds, loads and serves it in one process after another."""
