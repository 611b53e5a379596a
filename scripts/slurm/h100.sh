#!/bin/bash
# Nodes of 8 NVIDIA H100 each, InfiniBand or RoCE network.
#   sbatch scripts/slurm/h100.sh [KEY=VALUE]...
#   COMMAND=audit CONFIG=runs/NAME sbatch scripts/slurm/h100.sh       audits a finished run
#SBATCH --job-name=memguard
#SBATCH --partition=CHANGE_ME
#SBATCH --exclusive
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=96
#SBATCH --time=24:00:00
#SBATCH --signal=B:TERM@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log

COMMAND=${COMMAND:-train}
CONFIG=${CONFIG:-scripts/slurm/stories260k.yaml}
GPUS_PER_NODE=8
source .venv/bin/activate
# With several networks: export GLOO_SOCKET_IFNAME=eth0 NCCL_SOCKET_IFNAME=eth0

source scripts/slurm/job.sh "$@"
