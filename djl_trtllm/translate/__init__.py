"""Turns the configuration of one engine into that of another, line by line, and says what is not the same there."""
