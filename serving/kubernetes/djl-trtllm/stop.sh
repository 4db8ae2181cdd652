sleep {{ .Values.drainDelay }}
server='python.* .*/djl-trtllm serve'
pkill -TERM -f "$server"
while pgrep -f "$server" >/dev/null; do sleep 1; done
