"""The lifecycle of loaded models.

`open_source` and `prepare` turn what the user named into a `Model`. A `ModelService` runs it and takes its requests. A
server has a `Registry` of `ServedModel`s, each with one or more such services.
"""
