# syntax=docker/dockerfile:1
# djl-trtllm on the CPU, by OpenVINO:  docker build -f docker/cpu.Dockerfile -t djl-trtllm-cpu .   (docs/deploying.md)
# A tag with its digest: the registry may move the tag.
ARG PYTHON=3.12.12-slim-bookworm@sha256:593bd06efe90efa80dc4eee3948be7c0fde4134606dd40d8dd8dbcade98e669c

FROM python:${PYTHON} AS package
WORKDIR /build
COPY docker/requirements-build.txt ./
RUN python3 -m pip install --no-cache-dir --no-deps --require-hashes --target /backend --requirement requirements-build.txt
COPY pyproject.toml setup.py README.md LICENSE tensorrt_llm_toolkit.py ./
COPY djl_trtllm djl_trtllm
# With --root, because the base decides where Python's packages lie.
RUN PYTHONPATH=/backend python3 -m pip install --no-cache-dir --no-deps --no-build-isolation --root /installed .

FROM python:${PYTHON}
ARG PYTHON
# `compile` adds the compiler of checkpoints, with torch; `cpu` serves compiled engines only.
ARG EXTRA=cpu
# Install the dependencies in a separate layer, which stays cached when only the sources change.
COPY pyproject.toml docker/requirements-${EXTRA}.txt docker/install.sh docker/cut.py /opt/djl-trtllm/
RUN /opt/djl-trtllm/install.sh /opt/djl-trtllm/pyproject.toml "/opt/djl-trtllm/requirements-${EXTRA}.txt" "${EXTRA}" otel grpc && \
    python3 /opt/djl-trtllm/cut.py "/opt/djl-trtllm/requirements-${EXTRA}.txt"
RUN useradd --uid 1000 --create-home djl && \
    mkdir -p /opt/ml/model
COPY docker/entrypoint.sh /usr/local/bin/djl-trtllm-entrypoint
COPY docker/trt_llm_partition.py /opt/djl/partition/trt_llm_partition.py
COPY scripts/launch_triton_server.py /opt/djl-trtllm/scripts/launch_triton_server.py

# The caches are in the old container's places: on SageMaker /tmp is the instance's large disk.
ENV DJL_CACHE_DIR=/tmp/.djl.ai \
    HF_HOME=/tmp/.cache/huggingface \
    PYTHONUNBUFFERED=1

LABEL com.amazonaws.sagemaker.capabilities.accept-bind-to-port="true" \
      com.amazonaws.sagemaker.capabilities.multi-models="true" \
      com.amazonaws.sagemaker.capabilities.bidirectional-streaming="true" \
      org.opencontainers.image.title="djl-trtllm-cpu" \
      org.opencontainers.image.description="Serves large language models by serving.properties, on OpenVINO" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.base.name="docker.io/library/python:${PYTHON}"

# For requests, and for /metrics, which SageMaker scrapes there (docs/metrics.md).
EXPOSE 8080
# Use 0 if the server must write SageMaker's mounts: Neo, training jobs.
ARG RUN_AS=1000
USER ${RUN_AS}
WORKDIR /tmp
# Compiling at load takes long, so ignore failures in the first hour.
HEALTHCHECK --interval=15s --timeout=10s --start-period=60m --retries=4 \
    CMD ["/usr/local/bin/djl-trtllm-entrypoint", "healthcheck"]
ENTRYPOINT ["/usr/local/bin/djl-trtllm-entrypoint"]
CMD ["serve"]
# The sources are last: when only they change, everything above stays cached. They are copied, not mounted, because the
# cache of Buildah 1.28 does not look at what is mounted, and would go on with the old sources.
COPY --from=package /installed /
RUN ["djl-trtllm", "version"]
