#!/usr/bin/env bash
# Run memguard beside axolotl, in an environment of its own: a part of the tests with the versions
# that axolotl pins, and a training by axolotl with memguard's plugin. Not part of CI: axolotl pins
# older libraries than constraints.txt. The first run installs 1.7 GB; later ones take 10 minutes.
# The 4D engine is not tested: with transformers 5.16 its models do not run in float64, in which the
# engine's tests compare meshes.
#   scripts/axolotl_check.sh            the environment is build/axolotl, or $MEMGUARD_AXOLOTL_VENV
#   scripts/axolotl_check.sh --train    the training alone
set -euo pipefail
cd "$(dirname "$0")/.."
lock=scripts/axolotl_lock.txt
venv="${MEMGUARD_AXOLOTL_VENV:-build/axolotl}"
python="$venv/bin/python"
[ -x "$python" ] || python3 -m venv "$venv"
pip=("$python" -m pip --disable-pip-version-check)

if [ "$(cat "$venv/.memguard" 2>/dev/null)" != "$(cat pyproject.toml "$lock" | sha256sum)" ]; then
  echo "installing axolotl and memguard into $venv (once; some minutes)"
  "${pip[@]}" install --quiet --no-deps -r "$lock"
  # Fails where memguard's lower bounds do not admit a version of the lock.
  "${pip[@]}" install --quiet -c "$lock" -e .
  cat pyproject.toml "$lock" | sha256sum >"$venv/.memguard"
fi
# Packages that are left out are listed as missing, versions that do not fit as "but you have".
if "${pip[@]}" check | grep "but you have"; then
  echo "axolotl_check: the lock does not fit what its packages require" >&2
  exit 1
fi

export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 AXOLOTL_DO_NOT_TRACK=1
export PYTHONPATH="$PWD:$PWD/tests/integrations${PYTHONPATH:+:$PYTHONPATH}"

run_tests() {
  # Tests pass models between processes by pickle, which modules of the package kernels do not allow.
  local excluded=(
    # Gemma 2 has no SDPA attention in newer versions only.
    test_a_family_without_sdpa_is_loaded_with_eager_attention
    "test_packed_documents_have_the_numbers_they_have_alone and gemma2"
    test_it_is_not_compiled_for_every_packing
    "test_caps_and_sinks_reach_flex_attention and gemma2"
    "test_families_have_the_kernels_of_the_table and gemma2"
    test_flex_attention_has_no_smaller_heads
    # transformers' own loss of these families fails without labels.
    "test_router_loss and (granitemoe or jetmoe)"
    "test_other_architectures_are_refused_by_their_styles and granitemoeshared"
    # The test replaces a private function that has another result in newer versions.
    test_attention_flash
    # TRL 1.9 wraps the whole dataset, newer ones each batch of 1,000: such rows count as planned.
    test_rows_are_packed_in_batches_of_each_process
    # Its Trainer cannot load the optimizer of two processes on a CPU again ("tagged with cpu:0").
    "test_training_is_the_same_with_and_without_audits and ddp-trl-all"
    # TRL 1.9 takes 'compute_loss_func' with loss_type="nll" only, and that is not its default.
    test_trl_has_our_losses
  )
  local expression="${excluded[0]}" each
  for each in "${excluded[@]:1}"; do expression+=" or ($each)"; done
  USE_HUB_KERNELS=NO "$python" -m pytest -q -n 2 --dist loadfile -p no:anyio -p no:cacheprovider \
    -W "ignore:'click.utils:DeprecationWarning" -k "not ($expression)" \
    tests/integrations tests/test_api.py tests/test_api_adapters.py \
    tests/model tests/eval
}

run_training() {
  local folder
  folder="$(mktemp -d)"
  trap 'rm -rf "$folder"' RETURN
  "$python" - "$folder" <<'END'
import json
import sys
from pathlib import Path

import numpy as np
import trainer_program as program

folder = Path(sys.argv[1])
program.build_model().save_pretrained(folder / "model")
program.build_tokenizer().save_pretrained(folder / "model")
draw = np.random.default_rng(0)
for name in ("train", "unseen"):
    texts = (" ".join(f"w{id}" for id in draw.integers(2, 64, 30)) for _ in range(16))
    rows = (json.dumps({"text": text}) for text in texts)
    (folder / f"{name}.jsonl").write_text("\n".join(rows))
END
  cat >"$folder/run.yaml" <<END
base_model: $folder/model
plugins: [memguard.integrations.axolotl.MemguardPlugin]
memguard:
  goldfish: {k: 4}
  audit:
    members: $folder/train.jsonl
    nonmembers: $folder/unseen.jsonl
    base: adapter-off
    out: $folder/audits
    continuation_tokens: 8
    cache: false
datasets: [{path: $folder/train.jsonl, ds_type: json, type: completion}]
adapter: lora
lora_r: 4
lora_alpha: 8
lora_target_linear: true
lora_mlp_kernel: false
lora_qkv_kernel: false
lora_o_kernel: false
output_dir: $folder/out
dataset_prepared_path: $folder/prepared
sequence_len: 64
sample_packing: true
attn_implementation: sdpa
micro_batch_size: 1
gradient_accumulation_steps: 1
max_steps: 3
optimizer: adamw_torch
lr_scheduler: constant
learning_rate: 0.01
logging_steps: 1
save_strategy: "no"
bf16: false
END
  "$python" -m axolotl.cli.train "$folder/run.yaml" >"$folder/log" 2>&1 || {
    tail -n 40 "$folder/log" >&2
    return 1
  }
  grep "^memguard" "$folder/log"
  ls "$folder"/audits/step-3/report.html
}

[ "${1:-}" = --train ] || run_tests
run_training
