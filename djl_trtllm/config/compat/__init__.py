"""Configuration files of other servers, read as ours."""
