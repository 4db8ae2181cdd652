# syntax=docker/dockerfile:1
# djl-trtllm on TensorRT-LLM:  docker build -f docker/trtllm.Dockerfile -t djl-trtllm .   (docs/deploying.md)
# A tag with its digest: the registry may move the tag.
ARG TENSORRT_LLM=1.2.1@sha256:33cd085b772947bd22b7273886539331420404e5d2a4a039945241945ff927b9

FROM nvcr.io/nvidia/tensorrt-llm/release:${TENSORRT_LLM} AS package
WORKDIR /build
COPY docker/requirements-build.txt ./
RUN python3 -m pip install --no-cache-dir --no-deps --require-hashes --target /backend --requirement requirements-build.txt
COPY pyproject.toml setup.py README.md LICENSE tensorrt_llm_toolkit.py ./
COPY djl_trtllm djl_trtllm
# With --root, because the base decides where Python's packages lie.
RUN PYTHONPATH=/backend python3 -m pip install --no-cache-dir --no-deps --no-build-isolation --root /installed .

FROM nvcr.io/nvidia/tensorrt-llm/release:${TENSORRT_LLM}
ARG TENSORRT_LLM
# Install the dependencies in a separate layer, which stays cached when only the sources change.
COPY pyproject.toml docker/requirements-core.txt docker/install.sh /opt/djl-trtllm/
RUN /opt/djl-trtllm/install.sh /opt/djl-trtllm/pyproject.toml /opt/djl-trtllm/requirements-core.txt otel grpc
RUN test -x /opt/nvidia/nvidia_entrypoint.sh && \
    mkdir -p /opt/ml/model
COPY docker/entrypoint.sh /usr/local/bin/djl-trtllm-entrypoint
COPY docker/trt_llm_partition.py /opt/djl/partition/trt_llm_partition.py
COPY scripts/launch_triton_server.py /opt/djl-trtllm/scripts/launch_triton_server.py

# The caches are in the old container's places: on SageMaker /tmp is the instance's large disk. Without the variables of
# Open MPI 4.1 (OMPI) and 5.0 (PRTE), mpirun refuses to run as root; engine processes set them for themselves.
ENV DJL_CACHE_DIR=/tmp/.djl.ai \
    HF_HOME=/tmp/.cache/huggingface \
    OMPI_ALLOW_RUN_AS_ROOT=1 \
    OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 \
    PRTE_ALLOW_RUN_AS_ROOT=1 \
    PRTE_ALLOW_RUN_AS_ROOT_CONFIRM=1 \
    PYTHONUNBUFFERED=1

LABEL com.amazonaws.sagemaker.capabilities.accept-bind-to-port="true" \
      com.amazonaws.sagemaker.capabilities.multi-models="true" \
      com.amazonaws.sagemaker.capabilities.bidirectional-streaming="true" \
      org.opencontainers.image.title="djl-trtllm" \
      org.opencontainers.image.description="Serves large language models by serving.properties, on TensorRT-LLM" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.base.name="nvcr.io/nvidia/tensorrt-llm/release:${TENSORRT_LLM}"

# For requests, and for /metrics, which SageMaker scrapes there (docs/metrics.md).
EXPOSE 8080
# Use 0 if the server must write SageMaker's mounts: Neo, training jobs.
ARG RUN_AS=1000
USER ${RUN_AS}
WORKDIR /tmp
# Compiling at load takes long, so ignore failures in the first hour.
HEALTHCHECK --interval=15s --timeout=10s --start-period=60m --retries=4 \
    CMD ["/usr/local/bin/djl-trtllm-entrypoint", "healthcheck"]
# NVIDIA's script runs first: on older drivers it enables CUDA's compatibility libraries.
ENTRYPOINT ["/opt/nvidia/nvidia_entrypoint.sh", "/usr/local/bin/djl-trtllm-entrypoint"]
CMD ["serve"]
# The sources are last: when only they change, everything above stays cached. They are copied, not mounted, because the
# cache of Buildah 1.28 does not look at what is mounted, and would go on with the old sources.
COPY --from=package /installed /
RUN ["djl-trtllm", "version"]
