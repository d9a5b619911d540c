#!/bin/bash
# In ssh's place for mpirun: `rsh.sh [options] ADDRESS COMMAND...` runs a command on one of two "hosts" that share no memory, network
# namespaces (their names in DPFL_HOSTS, "ADDRESS=NAMESPACE ..."), each with a host name, a /dev/shm and IPC of its own.
while [[ ${1:-} == -* ]]; do
  case $1 in -x | -q | -n | -f | -T) shift ;; *) shift 2 ;; esac
done
address=${1:?which host}
shift
for pair in $DPFL_HOSTS; do
  [ "${pair%=*}" = "$address" ] && name=${pair#*=}
done
exec ip netns exec "${name:?unknown host $address}" unshare --uts --ipc --mount bash -c \
  'hostname "$0"; mount -t tmpfs none /dev/shm; eval exec "$*"' "$name" "$@"
