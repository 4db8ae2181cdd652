"""A toy engine that echoes the prompt: all that a backend needs."""
