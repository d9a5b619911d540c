#!/bin/bash
# mpirun calls this instead of ssh: `rsh.sh [options] ADDRESS COMMAND...` runs a command on one of
# two "hosts". They are network namespaces, by name in DPFL_HOSTS ("ADDRESS=NAMESPACE ..."), and
# share no memory: each has its own host name, /dev/shm and IPC.
while [[ ${1:-} == -* ]]; do
  case $1 in -x | -q | -n | -f | -T) shift ;; *) shift 2 ;; esac
done
address=${1:?which host}
shift
for pair in $DPFL_HOSTS; do
  [ "${pair%=*}" = "$address" ] && name=${pair#*=}
done
exec ip netns exec "${name:?unknown host $address}" unshare --uts --ipc --mount bash -c \
  'hostname "$0"; mount -t tmpfs none /dev/shm; exec bash -c "$*"' "$name" "$@"
