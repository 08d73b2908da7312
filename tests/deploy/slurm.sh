#!/usr/bin/env bash
# A real Slurm of N nodes on one machine: slurm.sh DIR N; then SLURM_CONF=DIR/slurm.conf srun ...
# Needs Debian's slurm-wlm and munge, and root. The caller ends what DIR/*.pid name.
set -euo pipefail
dir=$(mkdir -p "$1" && cd "$1" && pwd)
nodes=$2
host=$(hostname)
mkdir -p "${dir}/state" "${dir}/spool" "${dir}/log" /run/munge
chown munge:munge /run/munge
chmod 755 /run/munge
munge -n >/dev/null 2>&1 || runuser -u munge -- /usr/sbin/munged
{
  cat <<CONF
ClusterName=one
SlurmctldHost=${host}(127.0.0.1)
SlurmctldPort=$((20000 + $$ % 5000))
SlurmUser=root
AuthType=auth/munge
StateSaveLocation=${dir}/state
SlurmdSpoolDir=${dir}/spool/%n
SlurmctldPidFile=${dir}/ctld.pid
SlurmdPidFile=${dir}/%n.pid
SlurmctldLogFile=${dir}/log/ctld
SlurmdLogFile=${dir}/log/%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
SlurmctldTimeout=30
SlurmdTimeout=15
KillWait=20
CONF
  for i in $(seq "${nodes}"); do
    # The nodes are this machine: their tasks meet by a name that is its own.
    echo "NodeName=n${i} NodeHostname=${host} NodeAddr=127.0.0.1 Port=$((25000 + $$ % 5000 + i))" \
      "CPUs=$(nproc) State=UNKNOWN"
  done
  echo "PartitionName=all Nodes=ALL Default=YES State=UP OverSubscribe=FORCE:4"
} >"${dir}/slurm.conf"
export SLURM_CONF=${dir}/slurm.conf
for i in $(seq "${nodes}"); do
  grep -q "[[:space:]]n${i}\b" /etc/hosts || echo "127.0.0.1 n${i}" >>/etc/hosts
done
slurmctld -c
sleep 2
for i in $(seq "${nodes}"); do slurmd -N "n${i}"; done
for _ in $(seq 30); do
  [[ "$(sinfo -h -t idle -o %D | head -n 1)" == "${nodes}" ]] && exit 0
  sleep 1
done
sinfo
exit 1
