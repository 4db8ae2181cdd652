# syntax=docker/dockerfile:1
# djl-trtllm under DJL Serving's front end, on TensorRT-LLM:
#   docker build -f docker/djl.Dockerfile -t djl-trtllm-djl .   (docs/deploying.md)
# A tag with its digest: the registry may move the tag.
ARG TENSORRT_LLM=1.2.1@sha256:33cd085b772947bd22b7273886539331420404e5d2a4a039945241945ff927b9
ARG JAVA=17.0.15_6-jre-noble@sha256:8e90405bb240121ab38c76aa9e74627d4bd194a12dcc2ec13bd7ce1917f6d2fb
ARG MAVEN=3.9.9-eclipse-temurin-17@sha256:f58d59b6273e785ac0a4477f6e9b5ba1d7731c75b906c0f7b34076f1851318cc

FROM maven:${MAVEN} AS front-end
# Tag v0.36.0. No registry has the front end, so build it from its source.
ARG DJL_SERVING_COMMIT=1e53e50dcbf307c765cf7cc0bb97d23d7c02fb76
# The address of an archive that you keep yourself, if the builder must not reach the public one.
ARG DJL_SERVING_SOURCE=https://github.com/deepjavalibrary/djl-serving/archive/${DJL_SERVING_COMMIT}.tar.gz
# Of the files that build.sh reads, because archives of one commit differ in their compression.
ARG DJL_SERVING_SHA256=6aa2671c9812af986a1657958a4d88d1d2a7acf2190f4d452405fbd45f758de4
# hadolint ignore=DL3020
ADD ${DJL_SERVING_SOURCE} /source.tar.gz
COPY docker/djl /build
RUN mkdir /source && tar -xzf /source.tar.gz -C /source --strip-components=1 && \
    /build/check.sh /source "${DJL_SERVING_SHA256}" && \
    /build/build.sh /source /front-end && \
    cp /source/LICENSE /source/NOTICE /front-end/

FROM nvcr.io/nvidia/tensorrt-llm/release:${TENSORRT_LLM} AS package
WORKDIR /build
COPY docker/requirements-build.txt ./
RUN python3 -m pip install --no-cache-dir --no-deps --require-hashes --target /backend --requirement requirements-build.txt
COPY pyproject.toml setup.py README.md LICENSE tensorrt_llm_toolkit.py ./
COPY djl_trtllm djl_trtllm
# With --root, because the base decides where Python's packages lie.
RUN PYTHONPATH=/backend python3 -m pip install --no-cache-dir --no-deps --no-build-isolation --root /installed .

FROM eclipse-temurin:${JAVA} AS java

FROM nvcr.io/nvidia/tensorrt-llm/release:${TENSORRT_LLM}
ARG TENSORRT_LLM
# Install the dependencies in a separate layer, which stays cached when only the sources change. docker/trtllm.Dockerfile
# has the same one.
COPY pyproject.toml docker/requirements-core.txt docker/install.sh /opt/djl-trtllm/
RUN /opt/djl-trtllm/install.sh /opt/djl-trtllm/pyproject.toml /opt/djl-trtllm/requirements-core.txt otel grpc
COPY --from=java /opt/java/openjdk /opt/java/openjdk
COPY --from=front-end /front-end /opt/djl
RUN test -x /opt/nvidia/nvidia_entrypoint.sh && \
    mkdir -p /opt/ml/model
COPY serving/djl /opt/djl/conf
COPY docker/entrypoint.sh /usr/local/bin/djl-trtllm-entrypoint
COPY docker/trt_llm_partition.py /opt/djl/partition/trt_llm_partition.py
COPY scripts/launch_triton_server.py /opt/djl-trtllm/scripts/launch_triton_server.py

# The caches are in the old container's places. SERVING_FEATURES stays unset, because Java would look for the old
# container's scripts. With cuda.fork, Java queries the GPUs in a subprocess and keeps no memory on them.
# Without the variables of Open MPI 4.1 (OMPI) and 5.0 (PRTE), mpirun refuses to run as root; engine processes set them
# for themselves.
ENV PATH="/opt/java/openjdk/bin:${PATH}" \
    JAVA_HOME=/opt/java/openjdk \
    JAVA_OPTS="-Xmx1g -Xms1g -XX:+ExitOnOutOfMemoryError -Dai.djl.util.cuda.fork=true" \
    DJL_SERVING_HOME=/opt/djl \
    DJL_CACHE_DIR=/tmp/.djl.ai \
    HF_HOME=/tmp/.cache/huggingface \
    OMPI_ALLOW_RUN_AS_ROOT=1 \
    OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 \
    PRTE_ALLOW_RUN_AS_ROOT=1 \
    PRTE_ALLOW_RUN_AS_ROOT_CONFIRM=1 \
    MODEL_LOADING_TIMEOUT=1200 \
    PREDICT_TIMEOUT=240 \
    PYTHONUNBUFFERED=1

LABEL com.amazonaws.sagemaker.capabilities.accept-bind-to-port="true" \
      com.amazonaws.sagemaker.capabilities.multi-models="true" \
      org.opencontainers.image.title="djl-trtllm-djl" \
      org.opencontainers.image.description="djl-trtllm under DJL Serving, on TensorRT-LLM" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.base.name="nvcr.io/nvidia/tensorrt-llm/release:${TENSORRT_LLM}"

# For requests, and for /metrics, which SageMaker scrapes there (docs/metrics.md).
EXPOSE 8080
# Use 0 if the server must write SageMaker's mounts: Neo, training jobs.
ARG RUN_AS=1000
USER ${RUN_AS}
WORKDIR /tmp
# DJL Serving listens only after the model is loaded, so ignore failures in the first hour.
HEALTHCHECK --interval=15s --timeout=10s --start-period=60m --retries=4 \
    CMD ["/usr/local/bin/djl-trtllm-entrypoint", "healthcheck"]
# NVIDIA's script runs first: on older drivers it enables CUDA's compatibility libraries.
ENTRYPOINT ["/opt/nvidia/nvidia_entrypoint.sh", "/usr/local/bin/djl-trtllm-entrypoint"]
CMD ["serve"]
# The sources are last: when only they change, everything above stays cached. They are copied, not mounted, because the
# cache of Buildah 1.28 does not look at what is mounted, and would go on with the old sources.
COPY --from=package /installed /
RUN ["djl-trtllm", "version"]
