# What the Slurm files beside it do once their settings are made; they run it with `source`.
#
# Settings can be changed from the command line: sbatch scripts/slurm/h100.sh optim.lr=1e-5
# Before the time limit the run is signalled to save and the job is requeued, which resumes the run.
# After a failure it is requeued by the rule of `memguard train --max-restarts`: not after wrong
# settings or inputs, nor after two attempts in a row that made no new checkpoint.

set -u
MAX_RESTARTS=${MAX_RESTARTS:-3}
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

# torchrun exits with 1 whatever happened: RUN/ended.json tells the rest.
may_follow() {
  [ "$COMMAND" = train ] && [ "$MAX_RESTARTS" -gt 0 ] && python - "$MAX_RESTARTS" "$@" <<'PYTHON'
import sys
from pathlib import Path

from memguard.assets import find_asset
from memguard.config import load_run_config
from memguard.errors import MemguardError
from memguard.runtime.ended import may_follow

most, config, *settings = sys.argv[1:]
try:
    run = load_run_config(find_asset("configs", config, setting="CONFIG"), settings)
except MemguardError:
    sys.exit(1)  # The command has said what is wrong.
sys.exit(0 if may_follow(Path(run.output_dir) / run.name, int(most)) else 1)
PYTHON
}

if [ "$code" -ne 0 ] && { [ -n "$stopped" ] || may_follow "$CONFIG" "$@"; }; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
