#!/bin/bash
# Frontier-style nodes: 4 AMD MI250X each, which are 8 GPUs (GCDs); Slingshot network, ROCm.
#   sbatch scripts/slurm/frontier.sh [KEY=VALUE]...
#   COMMAND=audit CONFIG=runs/NAME sbatch scripts/slurm/frontier.sh       audits a finished run
#SBATCH --job-name=memguard
#SBATCH --account=CHANGE_ME
#SBATCH --partition=batch
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=56
#SBATCH --time=02:00:00
#SBATCH --signal=B:TERM@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log

COMMAND=${COMMAND:-train}
CONFIG=${CONFIG:-scripts/slurm/stories260k.yaml}
GPUS_PER_NODE=8
RCCL_PLUGIN=$HOME/aws-ofi-rccl/lib # without it RCCL falls back to TCP
source .venv/bin/activate

# Slingshot: gloo and RCCL (which reads NCCL's settings) over its interfaces, RCCL through libfabric.
export LD_LIBRARY_PATH=$RCCL_PLUGIN:${LD_LIBRARY_PATH:-}
export GLOO_SOCKET_IFNAME=hsn0
export NCCL_SOCKET_IFNAME=hsn
export NCCL_NET_GDR_LEVEL=3
export NCCL_CROSS_NIC=1
export FI_CXI_ATS=0
export HSA_FORCE_FINE_GRAIN_PCIE=1

source scripts/slurm/job.sh "$@"
