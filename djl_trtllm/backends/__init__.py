"""Engines that run models: one folder each."""
