"""Tests of config/options."""
