"""The commands of `djl-trtllm`, one per file; `djl_trtllm.cli` registers them."""
