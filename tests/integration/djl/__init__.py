"""The handlers under the real Java engine of DJL Serving, and under its Python engine alone."""
