"""Tests of config/rules."""
