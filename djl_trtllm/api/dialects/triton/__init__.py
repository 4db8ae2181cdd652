"""The API of Triton's TensorRT-LLM models, over HTTP (`http`) and gRPC (`rpc`), which know nothing of each other."""
