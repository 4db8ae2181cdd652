# The brackets keep this script itself from being found.
sleep {{ .Values.drainDelay }}
server='[p]ython.* .*/djl-trtllm serve'
pkill -TERM -f "$server"
while pgrep -f "$server" >/dev/null; do sleep 1; done
