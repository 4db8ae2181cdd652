# Waits for the leader, which starts this node's ranks over SSH.
exec /usr/sbin/sshd -D -e -f /dev/null -p 2222 -h /ssh/id -o AuthorizedKeysFile=/ssh/id.pub -o StrictModes=no \
    -o UsePAM=no -o PidFile=none -o PasswordAuthentication=no
