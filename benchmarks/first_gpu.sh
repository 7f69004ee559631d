#!/usr/bin/env bash
# The first hour on a machine with GPUs: every test that needs one, and a short run with each engine of a model as large
# as Qwen2.5-0.5B (random weights: nothing is downloaded but packages). Writes one report, REPORT.md, whatever fails.
#
#   benchmarks/first_gpu.sh [--out DIR] [--dry-run] [--no-setup] [--device cpu]
#
# --dry-run writes the report with the commands and runs none of them; --no-setup takes the environments as they are.
# --device cpu runs all of it with a tiny model on a machine without a GPU, for the script's own sake.
set -uo pipefail
cd "$(dirname "$0")/.."

out=runs/first-gpu dry="" device=cuda setup=yes
while [ $# -gt 0 ]; do
  case $1 in
    --out) out=$2; shift ;;
    --device) device=$2; shift ;;
    --dry-run) dry=yes ;;
    --no-setup) setup="" ;;
    *) sed -n '2,8s/^# \{0,1\}//p' "$0"; exit 2 ;;
  esac
  shift
done
mkdir -p "$out/logs"
report=$out/REPORT.md
failed=0

# step NAME COMMAND...: runs it, and adds a section with its status, its time and the end of its output.
step() {
  local name=$1 log status start=$SECONDS
  shift
  log=$out/logs/$(echo "$name" | tr -c 'a-z0-9\n' -).log
  printf '\n## %s\n\n```\n%s\n```\n' "$name" "$(printf '%q ' "$@")" >> "$report"
  [ -n "$dry" ] && return
  echo "== $name"
  timeout 3600 "$@" > "$log" 2>&1
  status=$?
  [ $status -eq 0 ] || failed=$((failed + 1))
  printf '\nstatus %d after %d s; the end of `%s`:\n\n```\n' $status $((SECONDS - start)) "$log" >> "$report"
  tail -n 40 "$log" >> "$report"
  printf '```\n' >> "$report"
}

# with ENGINE NAME OPTIONS...: a short run of the mesh.
with() {
  local engine=$1 name=$2 python=()
  shift 2
  [ "$engine" = vllm ] && python=(--rollout.python=.venv-vllm/bin/python)
  [ "$engine" = sglang ] && python=(--rollout.sglang.python=.venv-sglang/bin/python)
  step "run: $name" .venv/bin/rollmesh run benchmarks/first_gpu.yaml --run.dir="$out" --run.name="${name// /-}" \
    --model.path="$out/data/model" --data.train="$out/data/train.jsonl" --rollout.engine="$engine" "${python[@]}" "$@"
}

printf '# First runs on a GPU\n\n%s, commit %s\n' "$(date -u +%FT%TZ)" "$(git rev-parse --short HEAD 2> /dev/null)" > "$report"
step machine sh -c 'uname -a; nproc; free -g'
[ "$device" = cpu ] || step devices sh -c 'nvidia-smi && nvidia-smi topo -m'
[ -z "$setup" ] || step setup make setup vllm sglang DEVICE="$device"
step packages sh -c 'for v in .venv .venv-vllm .venv-sglang; do $v/bin/python -m pip list 2> /dev/null | grep -iE "^(torch|vllm|sglang|flash|transformers|nvidia-nccl)"; done'
step data .venv/bin/python -m benchmarks.first_gpu_data --out "$out/data" $([ "$device" = cpu ] && echo --tiny)
step "tests: learner, weights, engine hf" .venv/bin/python -m pytest -m gpu -n 0 -rs tests
step "tests: engine vllm" .venv-vllm/bin/python -m pytest -m gpu -n 0 -rs tests/generators/engines/vllm
[ "$device" = cpu ] || step "log-probs from logits" .venv/bin/python -m benchmarks.learner.loss_cost --device cuda

gpus=$(nvidia-smi -L 2> /dev/null | wc -l)
share=()
if [ "$device" = cpu ]; then
  share=(--learner.device=cpu --rollout.device=cpu --learner.param_dtype=float32 --model.dtype=float32)
elif [ "$gpus" -lt 2 ]; then
  # One device for all.
  share=(--placement.devices.learner=[0] --placement.devices.generators=[[0]])
  share+=(--rollout.vllm.gpu_memory_utilization=0.4 --rollout.sglang.mem_fraction=0.4)
fi
for engine in hf vllm sglang; do
  with "$engine" "$engine" "${share[@]}"
done
if [ "$gpus" -ge 2 ] || [ -n "$dry" ]; then
  with vllm "weights over nccl" --weights.transport=nccl
  with hf "weights over grpc" --weights.transport=grpc
fi
if [ "$gpus" -ge 4 ] || [ -n "$dry" ]; then
  with vllm "two ranks TP 2 vllm" --learner.ranks=2 --rollout.vllm.tensor_parallel=2
  with sglang "two ranks TP 2 sglang" --learner.ranks=2 --rollout.sglang.tensor_parallel=2
fi

printf '\n%d step(s) failed.\n' $failed >> "$report"
echo "$report: $failed step(s) failed"
exit $((failed > 0))
