# Stand-ins for the images' bases, where the real ones are not available (tools/images/stand_ins.py). Each has what the
# Dockerfiles need of its original, on a Debian made by debootstrap, and no more.
FROM debian-stand-in AS python
# A Python is brought along, because Debian's own is another version. It lies where the original has it.
COPY python /usr/local
RUN ldconfig && \
    ln -s python3.12 /usr/local/bin/python3 && \
    ln -s python3 /usr/local/bin/python && \
    python3 -m ensurepip && \
    ln -s pip3 /usr/local/bin/pip
CMD ["python3"]

# The release image has TensorRT-LLM, here the tests' fake, and NVIDIA's entry point.
FROM python AS tensorrt-llm
COPY tensorrt-llm /usr/local/lib/python3.12/site-packages
RUN mkdir -p /opt/nvidia && \
    printf '#!/bin/sh\nexec "$@"\n' >/opt/nvidia/nvidia_entrypoint.sh && \
    chmod +x /opt/nvidia/nvidia_entrypoint.sh
# The fake's GPU.
ENV FAKE_TENSORRT_LLM_TABLE=/usr/local/lib/python3.12/site-packages/names.json \
    FAKE_TENSORRT_LLM_SCRIPT={} \
    FAKE_GPUS=1 \
    FAKE_GPU_NAME="NVIDIA H200" \
    FAKE_GPU_COMPUTE_CAPABILITY=9.0 \
    FAKE_GPU_MEMORY=151397597184 \
    FAKE_GPU_DRIVER=580.65.06

FROM debian-stand-in AS maven
RUN apt-get update && \
    apt-get install -y --no-install-recommends maven openjdk-17-jdk-headless && \
    rm -rf /var/lib/apt/lists/*

FROM debian-stand-in AS java
RUN apt-get update && \
    apt-get install -y --no-install-recommends openjdk-17-jre-headless && \
    rm -rf /var/lib/apt/lists/* && \
    mkdir -p /opt/java && \
    cp -rL /usr/lib/jvm/java-17-openjdk-* /opt/java/openjdk
