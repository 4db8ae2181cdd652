# syntax=docker/dockerfile:1
# djl-trtllm on TensorRT-LLM:  docker build -f docker/trtllm.Dockerfile -t djl-trtllm .   (docs/deploying.md)
ARG TENSORRT_LLM=1.2.1

FROM nvcr.io/nvidia/tensorrt-llm/release:${TENSORRT_LLM} AS wheel
WORKDIR /build
COPY pyproject.toml setup.py README.md LICENSE ./
COPY djl_trtllm djl_trtllm
RUN python3 -m pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM nvcr.io/nvidia/tensorrt-llm/release:${TENSORRT_LLM}
ARG TENSORRT_LLM
# The dependencies are a layer of their own, which a change of the sources leaves as it is.
COPY pyproject.toml docker/pins.txt docker/install.sh /opt/djl-trtllm/
RUN /opt/djl-trtllm/install.sh /opt/djl-trtllm/pyproject.toml /opt/djl-trtllm/pins.txt
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
    python3 -m pip install --no-cache-dir --no-deps /wheels/*.whl && \
    djl-trtllm version && \
    test -x /opt/nvidia/nvidia_entrypoint.sh && \
    mkdir -p /opt/ml/model
COPY docker/entrypoint.sh /usr/local/bin/djl-trtllm-entrypoint

# The caches are where the old container had them: on SageMaker /tmp is the instance's large disk. Open MPI, of which
# TensorRT-LLM makes its processes, refuses root otherwise.
ENV DJL_CACHE_DIR=/tmp/.djl.ai \
    HF_HOME=/tmp/.cache/huggingface \
    OMPI_ALLOW_RUN_AS_ROOT=1 \
    OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 \
    PYTHONUNBUFFERED=1

LABEL com.amazonaws.sagemaker.capabilities.accept-bind-to-port="true" \
      com.amazonaws.sagemaker.capabilities.multi-models="true" \
      org.opencontainers.image.title="djl-trtllm" \
      org.opencontainers.image.description="Serves large language models by serving.properties, on TensorRT-LLM" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.base.name="nvcr.io/nvidia/tensorrt-llm/release:${TENSORRT_LLM}"

EXPOSE 8080
# 0 where what SageMaker mounts has to be written: Neo, training jobs.
ARG RUN_AS=1000
USER ${RUN_AS}
WORKDIR /tmp
# A model that is compiled when it is loaded takes its time; failures of the first hour do not count.
HEALTHCHECK --interval=15s --timeout=10s --start-period=60m --retries=4 \
    CMD ["/usr/local/bin/djl-trtllm-entrypoint", "healthcheck"]
# NVIDIA's script comes first: it puts CUDA's compatibility libraries in front where the driver is an older one.
ENTRYPOINT ["/opt/nvidia/nvidia_entrypoint.sh", "/usr/local/bin/djl-trtllm-entrypoint"]
CMD ["serve"]
