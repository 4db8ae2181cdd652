"""`djl-trtllm quality`: whether two engines, or two servers, answer alike."""
