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

# -- no changes needed below -----------------------------------------------------------------------
# Settings can be changed from the command line: sbatch scripts/slurm/perlmutter.sh optim.lr=1e-5
# Before the time limit the run is signalled to save and the job is requeued, which resumes the run.

set -u
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((SLURM_CPUS_PER_TASK / GPUS_PER_NODE))}
export PYTORCH_ALLOC_CONF=${PYTORCH_ALLOC_CONF:-expandable_segments:True}
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
# Time that torchrun allows for writing a checkpoint (seconds): just under the notice of --signal.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=270

stopped=
trap 'stopped=yes; scancel --signal=TERM "$SLURM_JOB_ID"' TERM

first_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun --cpus-per-task="$SLURM_CPUS_PER_TASK" torchrun \
  --nnodes="$SLURM_NNODES" --nproc-per-node="$GPUS_PER_NODE" --max-restarts=0 \
  --rdzv-backend=c10d --rdzv-endpoint="$first_node:29500" --rdzv-id="$SLURM_JOB_ID" \
  -m memguard "$COMMAND" "$CONFIG" "$@" &
job=$!
# A signal interrupts `wait` before the job has ended.
until wait "$job"; code=$?; ! kill -0 "$job" 2>/dev/null; do :; done

if [ -n "$stopped" ] && [ "$code" -ne 0 ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
