"""`djl-trtllm bench`: load on any server of these APIs, and what its clients notice."""
