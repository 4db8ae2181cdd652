"""Inside DJL Serving: the worker process that DJL's Python engine starts, in rolling batch mode and in async mode.

The dialects, the rolling batch and the model's lifecycle are those of the HTTP server. This package moves `Item`s, the
parts of a response as DJL's Java side reads them. The entry points are `djl_trtllm.handler` and
`djl_trtllm.async_handler`.
"""
