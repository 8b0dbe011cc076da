#!/usr/bin/env bash
# Everything that wants a GPU, in one go: correctness on the device, no host sync, CUDA graphs, then times.
#
#   OUT=folder BUDGET=seconds benchmarks/gpu.sh             on a machine with torch, triton and pytest
#   benchmarks/gpu.sh --dry-run                             the same steps at tiny sizes in Triton's interpreter
#
# A part that fails or runs out of time is told at the end, and the others run all the same. Nothing is installed.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 2
PYTHON=${PYTHON:-python3}
OUT=${OUT:-benchmarks/results}
BUDGET=${BUDGET:-540}
mkdir -p "$OUT"
export PYTHONUNBUFFERED=1
dry=()
tests=(tests/kernels)
which_tests="not production"
if [ "${1:-}" = --dry-run ]; then
    export TRITON_INTERPRET=1
    dry=(--dry-run)
    tests=(tests/kernels/test_whiten.py)
    which_tests="by_hand and not ranks"
fi

summary=()
failed=0

# part NAME SECONDS COMMAND...: at most so many seconds, and never beyond the budget.
part() {
    local name=$1 limit=$2 left=$((BUDGET - SECONDS)) start=$SECONDS status
    shift 2
    if [ "$left" -lt 15 ]; then
        summary+=("$name: not run, the time is up")
        failed=1
        return
    fi
    echo "== $name"
    timeout -k 5 "$((limit < left ? limit : left))" "$@" 2>&1 | tee "$OUT/gpu-$name.log"
    status=${PIPESTATUS[0]}
    case $status in
    0) summary+=("$name: ok, $((SECONDS - start)) s") ;;
    124 | 137) summary+=("$name: stopped after $((SECONDS - start)) s, what it had done stands in its log") failed=1 ;;
    *) summary+=("$name: FAILED with status $status after $((SECONDS - start)) s") failed=1 ;;
    esac
}

workers=()
if "$PYTHON" -c 'import xdist' 2>/dev/null; then
    workers=(-n "$(nproc)")
fi

part versions 60 "$PYTHON" -c 'import platform, torch, triton
print("Python", platform.python_version(), "torch", torch.__version__, "triton", triton.__version__)
print(torch.cuda.get_device_properties(0) if torch.cuda.is_available() else "no GPU")'
# The configuration of the project asks for plugins that a lent machine may lack.
part kernels 300 "$PYTHON" -m pytest -c /dev/null --rootdir . --confcutdir . -p no:cacheprovider -q "${workers[@]}" \
    "${tests[@]}" --backend gpu -k "$which_tests" -m 'not slow and not long'
part device 120 "$PYTHON" -m benchmarks.gpu_device check "${dry[@]}"
# It keeps to the time that is left by itself, so that what it has measured is written.
part times 400 "$PYTHON" -m benchmarks.gpu_device time --csv "$OUT/gpu.csv" --seconds "$((BUDGET - SECONDS - 20))" \
    "${dry[@]}"

printf '\n== summary\n'
printf '%s\n' "${summary[@]}" | tee "$OUT/gpu-summary.txt"
exit "$failed"
