# Starts a rank for each GPU of the group, {{ .Values.gpus }} on each node, the first one here, which serves.
set -eu
name=${LWS_LEADER_ADDRESS%%.*} domain=${LWS_LEADER_ADDRESS#*.}
ssh="ssh -p 2222 -i /ssh/id -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR"
hosts=$LWS_LEADER_ADDRESS:{{ .Values.gpus }}
for worker in $(seq $((LWS_GROUP_SIZE - 1))); do
    host=$name-$worker.$domain
    until $ssh "$host" true; do sleep 5; done
    hosts=$hosts,$host:{{ .Values.gpus }}
done
# The ranks belong to the launcher, so a server whose engine has failed ends.
export SERVING_RETRY_THRESHOLD=0
# A session over SSH has none of the container's variables; a pod's own name and place are not the others'.
variables=$(compgen -e | grep -Ev '^(HOSTNAME|PWD|OLDPWD|SHLVL|_|LWS_.*|KUBERNETES_.*)$' | sed 's/^/-x /')
# Open MPI 4.1 reads the first, 5.0 the second.
export OMPI_MCA_plm_rsh_agent=$ssh PRTE_MCA_plm_ssh_agent=$ssh
exec mpirun --prefix "$(dirname "$(dirname "$(command -v mpirun)")")" --host "$hosts" $variables \
    trtllm-llmapi-launch djl-trtllm serve
