#!/bin/bash
# `up.sh FOLDER` starts a Slurm of two nodes, n1 and n2, on this machine; `down.sh FOLDER` ends it.
# It needs root and installs Debian's packages if they are missing. Everything else lies in FOLDER,
# where clients find it by SLURM_CONF=FOLDER/slurm.conf. The last line on stderr says why it failed.
set -eu
folder=${1:?which folder}
fail() { echo "$*" >&2; exit 1; }
[ "$(id -u)" = 0 ] || fail "starting Slurm needs root"

if ! (hash slurmctld slurmd munged srun) 2>/dev/null; then
  command -v apt-get >/dev/null || fail "Slurm is not installed, and there is no apt-get"
  # Debian would start its own daemons: policy-rc.d says no for the while
  policy=/usr/sbin/policy-rc.d
  if [ ! -e $policy ]; then
    printf '#!/bin/sh\nexit 101\n' > $policy
    chmod +x $policy
    trap "rm -f $policy" EXIT
  fi
  export DEBIAN_FRONTEND=noninteractive
  get=(apt-get -o DPkg::Lock::Timeout=300 install -y --no-install-recommends)
  log=$folder.apt.log
  { apt-get update && "${get[@]}" slurmctld slurmd slurm-client munge libpmi2-0; } >"$log" 2>&1 </dev/null ||
    fail "Slurm could not be installed: $(tail -n 1 "$log")"
fi

mkdir -p "$folder"/{state,log,n1,n2}
chmod 755 "$folder"
host=$(hostname -s)

# munge: a key and a socket of its own, so that one of the system's is neither needed nor disturbed
key=$folder/munge/key
mkdir -p "$folder/munge"
[ -s "$key" ] || head -c 1024 /dev/urandom > "$key"
chown -R munge: "$folder/munge"; chmod 711 "$folder/munge"; chmod 400 "$key"
setpriv --reuid munge --regid munge --clear-groups munged --force --num-threads=2 \
  --key-file="$key" --socket="$folder/munge/socket" --pid-file="$folder/munge/munged.pid" \
  --log-file="$folder/munge/log" --seed-file="$folder/munge/seed" ||
  fail "munged did not start: $(tail -n 1 "$folder/munge/log")"

cat > "$folder/slurm.conf" <<EOF
ClusterName=tests
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=18817
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$folder/munge/socket,cred_expire=5
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/%n
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/%n/slurmd.pid
SlurmctldLogFile=$folder/log/slurmctld
SlurmdLogFile=$folder/log/%n
# no cgroups, no accounting: a container has neither
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=2,requeue_delay=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
# a preempted job gets the signal that it asked for; without this, TERM goes to its steps
SlurmctldParameters=preempt_send_user_signal
MpiDefault=none
SwitchType=switch/none
ReturnToService=2
KillWait=20
MinJobAge=600
SlurmdParameters=config_overrides
NodeName=n1 NodeHostname=$host NodeAddr=127.0.0.1 Port=18818 CPUs=4 RealMemory=64000
NodeName=n2 NodeHostname=$host NodeAddr=127.0.0.1 Port=18819 CPUs=4 RealMemory=64000
PartitionName=normal Nodes=n1,n2 Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime=60
PartitionName=urgent Nodes=n1,n2 PriorityTier=9 PreemptMode=OFF
EOF
export SLURM_CONF=$folder/slurm.conf
slurmctld -f "$SLURM_CONF" || fail "slurmctld did not start"
for n in n1 n2; do slurmd -f "$SLURM_CONF" -N $n || fail "slurmd $n did not start"; done
for _ in $(seq 300); do
  [ "$(timeout 5 sinfo -h -N -p normal -t idle -o %N 2>/dev/null | wc -l)" = 2 ] && exit 0
  sleep 0.2
done
fail "the nodes did not come up: $(tail -qn 1 "$folder"/log/*)"
