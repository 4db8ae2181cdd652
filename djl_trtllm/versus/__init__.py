"""`djl-trtllm versus`: one model on several engines behind this server, measured in turns."""
