"""TensorRT-LLM model handler for DJL Serving and SageMaker."""

__version__ = "0.1.0"
