#!/bin/bash
# Perlmutter-style nodes: 4 NVIDIA A100 each, Slingshot network.
#   sbatch scripts/slurm/perlmutter.sh [KEY=VALUE]...
#   COMMAND=audit CONFIG=runs/NAME sbatch scripts/slurm/perlmutter.sh       audits a finished run
#SBATCH --job-name=memguard
#SBATCH --account=CHANGE_ME
#SBATCH --constraint=gpu
#SBATCH --qos=regular
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=128
#SBATCH --time=06:00:00
#SBATCH --signal=B:TERM@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log

COMMAND=${COMMAND:-train}
CONFIG=${CONFIG:-scripts/slurm/stories260k.yaml}
GPUS_PER_NODE=4
source .venv/bin/activate

# Slingshot: gloo and NCCL over its interfaces, NCCL through libfabric.
export GLOO_SOCKET_IFNAME=hsn0
export NCCL_SOCKET_IFNAME=hsn
export NCCL_NET="AWS Libfabric"
export NCCL_NET_GDR_LEVEL=PHB
export NCCL_CROSS_NIC=1
export FI_CXI_RDZV_THRESHOLD=0
export FI_CXI_RDZV_GET_MIN=0

source scripts/slurm/job.sh "$@"
