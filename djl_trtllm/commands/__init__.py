"""The commands of `djl-trtllm`, one in a file; `djl_trtllm.cli` puts them together."""
