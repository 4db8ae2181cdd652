"""Tests of config/sources."""
