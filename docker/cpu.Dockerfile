# syntax=docker/dockerfile:1
# djl-trtllm on the CPU, by OpenVINO:  docker build -f docker/cpu.Dockerfile -t djl-trtllm-cpu .   (docs/deploying.md)
ARG PYTHON=3.12.12-slim-bookworm

FROM python:${PYTHON} AS wheel
WORKDIR /build
COPY pyproject.toml setup.py README.md LICENSE ./
COPY djl_trtllm djl_trtllm
RUN python3 -m pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:${PYTHON}
ARG PYTHON
# `compile` brings the compiler of checkpoints as well, with torch; `cpu` serves what is compiled.
ARG EXTRA=cpu
# The dependencies are a layer of their own, which a change of the sources leaves as it is.
COPY pyproject.toml docker/pins.txt docker/install.sh /opt/djl-trtllm/
RUN /opt/djl-trtllm/install.sh /opt/djl-trtllm/pyproject.toml /opt/djl-trtllm/pins.txt "${EXTRA}"
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
    python3 -m pip install --no-cache-dir --no-deps /wheels/*.whl && \
    djl-trtllm version && \
    useradd --uid 1000 --create-home djl && \
    mkdir -p /opt/ml/model
COPY docker/entrypoint.sh /usr/local/bin/djl-trtllm-entrypoint

# The caches are where the old container had them: on SageMaker /tmp is the instance's large disk.
ENV DJL_CACHE_DIR=/tmp/.djl.ai \
    HF_HOME=/tmp/.cache/huggingface \
    PYTHONUNBUFFERED=1

LABEL com.amazonaws.sagemaker.capabilities.accept-bind-to-port="true" \
      com.amazonaws.sagemaker.capabilities.multi-models="true" \
      org.opencontainers.image.title="djl-trtllm-cpu" \
      org.opencontainers.image.description="Serves large language models by serving.properties, on OpenVINO" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.base.name="docker.io/library/python:${PYTHON}"

EXPOSE 8080
# 0 where what SageMaker mounts has to be written: Neo, training jobs.
ARG RUN_AS=1000
USER ${RUN_AS}
WORKDIR /tmp
# A model that is compiled when it is loaded takes its time; failures of the first hour do not count.
HEALTHCHECK --interval=15s --timeout=10s --start-period=60m --retries=4 \
    CMD ["/usr/local/bin/djl-trtllm-entrypoint", "healthcheck"]
ENTRYPOINT ["/usr/local/bin/djl-trtllm-entrypoint"]
CMD ["serve"]
