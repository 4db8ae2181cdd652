"""`python -m djl_trtllm`: the `djl-trtllm` command."""

from djl_trtllm.cli import main

main()
