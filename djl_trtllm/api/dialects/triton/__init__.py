"""The API of Triton's TensorRT-LLM models, over HTTP (`dialect`) and gRPC (`rpc`), which know nothing of each other."""
