"""An executor that plays a script: for tests, without a model."""
