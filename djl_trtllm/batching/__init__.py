"""The rolling batch: the waiting queue, the running requests, and the one place where a request ends.

A plain state machine without threads or asyncio. Each batch of messages from the executor is one `process` call. It
gives each request's consumer one chunk per sequence, however many iterations the messages hold.
"""
