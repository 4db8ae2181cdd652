"""Inside DJL Serving: the worker process that DJL's Python engine starts, in rolling batch mode and in async mode.

The dialects, the rolling batch and the life of the model are those of the HTTP server; what is here moves `Item`s, the
parts of answers as DJL's Java side reads them. The entry points are `djl_trtllm.handler` and
`djl_trtllm.async_handler`.
"""
