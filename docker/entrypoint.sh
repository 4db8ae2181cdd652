#!/bin/sh
# Entry point of the images. `serve`, SageMaker's command, is the default; `partition` and `train` compile a checkpoint,
# and so does a start by SageMaker Neo; `healthcheck` calls /ping; any other command runs unchanged.
#
# djl-trtllm itself translates the variables of SageMaker and of other servers (docs/options.md).
# The image with DJL Serving sets DJL_SERVING_HOME.
set -eu

cache=${DJL_CACHE_DIR:-/tmp/.djl.ai}
model_store=${SERVING_MODEL_STORE:-/opt/ml/model}

fail() {
    echo "entrypoint: $*" >&2
    exit 1
}

# A mount belongs to a user of the host. Check it now, before a download or a compile.
writable() {
    mkdir -p "$1" 2>/dev/null || true
    { [ -d "$1" ] && [ -w "$1" ] && [ -x "$1" ]; } || fail "$1 ($2) cannot be written by uid $(id -u). If it is a" \
        "mount: \`chown -R $(id -u) DIRECTORY\` on the host, or \`docker run -u UID:GID\` with the directory's owner"
}

readable() {
    { [ -r "$1" ] && [ -x "$1" ]; } || [ ! -e "$1" ] || fail "$1 ($2) cannot be read by uid $(id -u). If it is a" \
        "mount: \`chmod -R a+rX DIRECTORY\` on the host, or \`docker run -u UID:GID\` with the directory's owner"
}

check_caches() {
    writable "$cache" "cache: DJL_CACHE_DIR"
    # Offline, the hub's cache may be a read-only mount.
    if [ -n "${HF_HOME:-}" ] && [ -z "${HF_HUB_OFFLINE:-}" ]; then
        writable "$HF_HOME" "downloads of the Hugging Face hub: HF_HOME; read-only will do with HF_HUB_OFFLINE=1"
    fi
}

# With less, the kernel ends the server before it can log why, or has it read its own files again and again. With the
# bundled model, of 7 MB, the server and its engine process take 137 MB.
least_memory=128

enough_memory() {
    for file in /sys/fs/cgroup/memory.max /sys/fs/cgroup/memory/memory.limit_in_bytes; do
        limit=$(cat "$file" 2>/dev/null) || continue
        [ "$limit" = max ] || [ "$limit" -ge $((least_memory << 20)) ] || fail "this container may use" \
            "$((limit >> 20)) MiB of memory ($file), and the server needs $least_memory MiB beside the model: raise" \
            "\`docker run --memory\` (Kubernetes: resources.limits.memory)"
    done
}

# default NAME VALUE: set a variable that is unset or empty.
default() {
    eval "[ -n \"\${$1:-}\" ] || export $1=\"\$2\""
}

serve() {
    enough_memory
    readable "$model_store" model
    check_caches
    [ -z "${DJL_SERVING_HOME:-}" ] || serve_with_djl "$@"
    exec djl-trtllm serve "$@"
}

serve_with_djl() {
    # DJL Serving does not read the port that SageMaker gives.
    if [ -n "${SAGEMAKER_BIND_TO_PORT:-}" ]; then
        default SERVING_INFERENCE_ADDRESS "http://0.0.0.0:$SAGEMAKER_BIND_TO_PORT"
        default SERVING_MANAGEMENT_ADDRESS "http://0.0.0.0:$SAGEMAKER_BIND_TO_PORT"
    fi
    # Java needs two of the variables that djl-trtllm translates: the queue's length and the GPUs per worker.
    [ -z "${MAX_CONCURRENT_REQUESTS:-}" ] || default SERVING_JOB_QUEUE_SIZE "$MAX_CONCURRENT_REQUESTS"
    [ "${SM_NUM_GPUS:-0}" = 0 ] || default TENSOR_PARALLEL_DEGREE "$SM_NUM_GPUS"
    # One engine batches all requests; a worker that died is replaced.
    default SERVING_MIN_WORKERS 1
    default SERVING_MAX_WORKERS 1
    default SERVING_RETRY_THRESHOLD 10
    default OPTION_ENGINE Python
    # As engine MPI, DJL Serving would start a process for each GPU, and none without GPUs; TensorRT-LLM starts its own.
    [ -z "${SERVING_LOAD_MODELS:-}" ] ||
        SERVING_LOAD_MODELS=$(printf %s "$SERVING_LOAD_MODELS" | sed 's/:MPI\([]:=]\)/:Python\1/g')
    # DJL Serving loads nothing from an empty folder, whatever OPTION_MODEL_ID says, unless the folder is named.
    if [ -n "${OPTION_MODEL_ID:-}" ] && [ -z "${HF_MODEL_ID:-}" ]; then
        place=$model_store
        [ -d "$place" ] || place=$cache/model
        mkdir -p "$place"
        [ -n "$(ls -A "$place")" ] ||
            default SERVING_LOAD_MODELS "$(printf %s "$OPTION_MODEL_ID" | tr -c '[:alnum:]_' _)::Python=$place"
    fi
    # A model's own serving.properties overrides OPTION_*. `trtllm` or `enable` in it selects rolling batch.
    if [ -z "${OPTION_ENTRYPOINT:-}${DJL_ENTRY_POINT:-}" ]; then
        if cat "$model_store/serving.properties" "$model_store"/*/serving.properties 2>/dev/null |
            grep -Eq '^[[:space:]]*option\.rolling_batch[[:space:]]*[=:][[:space:]]*(trtllm|enable)'; then
            export OPTION_ENTRYPOINT=djl_trtllm.handler
        else
            export OPTION_ENTRYPOINT=djl_trtllm.async_handler OPTION_ASYNC_MODE=true OPTION_ROLLING_BATCH=disable
        fi
    fi
    # shellcheck disable=SC2086  # these two are lists
    exec java ${JAVA_OPTS:-} ${SAGEMAKER_MODEL_SERVER_VMARGS:-} "-DMODEL_SERVER_HOME=$DJL_SERVING_HOME" \
        "-Dlog4j.configurationFile=$DJL_SERVING_HOME/conf/log4j2.xml" -cp "$DJL_SERVING_HOME/lib/*" \
        ai.djl.serving.ModelServer -f "$DJL_SERVING_HOME/conf/config.properties" "$@"
}

# `partition CHECKPOINT OUT`, or with the old container's arguments.
partition() {
    checkpoint=/opt/ml/input/data/training
    out=""
    case "${1:-}" in
    [!-]*) exec djl-trtllm compile "$@" ;;
    esac
    while [ $# -gt 0 ]; do
        case "$1" in
        --skip-copy) shift && continue ;;
        esac
        [ $# -gt 1 ] || fail "partition: $1 needs a value"
        case "$1" in
        --model-dir | --model-id) checkpoint=$2 ;;
        --save-mp-checkpoint-path) out=$2 ;;
        --tensor-parallel-degree) export TENSOR_PARALLEL_DEGREE="$2" ;;
        --pipeline-parallel-degree) export PIPELINE_PARALLEL_DEGREE="$2" ;;
        --quantization) export OPTION_QUANTIZE="$2" ;;
        --engine) ;;
        *) fail "partition: $1 is no argument of it; use \`partition CHECKPOINT OUT\`" ;;
        esac
        shift 2
    done
    [ -n "$out" ] || fail "partition: name where the engine goes with --save-mp-checkpoint-path"
    compile "$checkpoint" "$out"
}

compile() {
    check_caches
    case "${2:-}" in
    "" | *://*) ;;
    *) writable "$2" "the compiled engine" ;;
    esac
    exec djl-trtllm compile "$@"
}

healthcheck() {
    exec python3 -c '
import os, socket, ssl, urllib.request

port = os.environ.get("SAGEMAKER_BIND_TO_PORT") or os.environ.get("SERVING_INFERENCE_PORT") or "8080"
tls = bool(os.environ.get("SERVING_CERTIFICATE_FILE"))
if tls and os.environ.get("SERVING_CLIENT_CA_FILE"):
    # This has no certificate of a client.
    socket.create_connection(("127.0.0.1", int(port)), timeout=5).close()
else:
    # The certificate is for the name that clients use, not for this address.
    context = ssl._create_unverified_context()
    handlers = urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)
    url = "%s://127.0.0.1:%s/ping" % ("https" if tls else "http", port)
    urllib.request.build_opener(*handlers).open(url, timeout=5)
'
}

# A uid of `docker run -u` that does not exist in the image has no home and no name, and PyTorch needs both.
if ! id -un >/dev/null 2>&1; then
    HOME=$cache
    LOGNAME=uid$(id -u)
    export HOME LOGNAME
fi

if [ -n "${SM_NEO_EXECUTION_CONTEXT:-}" ]; then
    # Without arguments djl-trtllm reads Neo's variables.
    writable "${SM_NEO_COMPILED_MODEL_DIR:-/opt/ml/model/compiled}" "Neo's output"
    compile
fi
case "${1:-serve}" in
serve) [ $# = 0 ] || shift && serve "$@" ;;
partition | train) shift && partition "$@" ;;
healthcheck) healthcheck ;;
*) exec "$@" ;;
esac
