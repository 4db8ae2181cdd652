"""Builds the images and measures them: `scripts/images`."""
