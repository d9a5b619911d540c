#!/bin/bash
# Stop what `up.sh FOLDER` started, by the process numbers it left, and nothing else.
folder=${1:?which folder}
export SLURM_CONF=$folder/slurm.conf
sed -i 's/^KillWait=.*/KillWait=1/' "$SLURM_CONF"  # what still runs has no twenty seconds to end
timeout 10 scontrol reconfigure >/dev/null 2>&1
timeout 10 scancel --signal=KILL --full -u root >/dev/null 2>&1
timeout 10 scancel -u root >/dev/null 2>&1
for _ in $(seq 50); do [ -z "$(timeout 5 squeue -h 2>/dev/null)" ] && break; sleep 0.2; done
for file in "$folder"/n?/slurmd.pid "$folder/slurmctld.pid" "$folder/munge/munged.pid"; do
  [ -s "$file" ] || continue
  pid=$(cat "$file")
  case "$(cat "/proc/$pid/comm" 2>/dev/null)" in slurmd|slurmctld|munged) ;; *) continue ;; esac
  kill "$pid"
  for _ in $(seq 50); do kill -0 "$pid" 2>/dev/null || break; sleep 0.1; done
done
