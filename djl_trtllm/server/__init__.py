"""The HTTP server: the routes of the dialects (`api`) and of model management, metrics, start and shutdown."""
