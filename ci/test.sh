#!/usr/bin/env bash
# The checks, one step each. The README's test command, nox, the lanes and .ci/run all come here.
#
#   bash ci/test.sh              a bare machine: makes .venv, installs, runs the default steps
#   bash ci/test.sh audit docs   only these
#   bash ci/test.sh --list       the steps
#   PYTHON=... bash ci/test.sh   in an environment that is already there
#
# Every step is run and timed, whatever the others did; the exit status is 1 when one failed.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

STEPS="\
lint         ruff: format and rules
types        mypy
matrix       the lanes are right, and the workflow is theirs
docs         the generated pages are current, kernels excepted
cpu          the tests, kernels excepted
interpreter  the kernels in Triton's interpreter, against the oracle
rehearsal    every invariant and the GPU's proofs through the kernels, in the interpreter
audit        kernels compiled for six GPUs, held against their limits and docs/kernels.md
audit-full   kernels compiled for all twelve GPUs, held against their limits
kernels-page docs/kernels.md is current
audit-nvidia the same for NVIDIA's six (Triton 3.4 brings no linker for AMD)
intel        Intel's Triton: SPIR-V, native code, execution on the CPU
device       the tests on this machine's GPU; red when it is not LANE_VENDOR's
faults       planted faults are caught"
DEFAULT=(lint types matrix docs cpu interpreter audit)
JOBS="${DASH_JOBS:-2}"

if [[ "${1:-}" == "--list" ]]; then
    echo "$STEPS"
    exit
fi

install() {
    local python
    python="$(command -v python3 || command -v python)"
    [[ -x .venv/bin/python ]] || "$python" -m venv .venv || return
    .venv/bin/python -m pip install --quiet --constraint constraints.txt \
        --editable ".[cpu,cli,plot,test]" || return
}

lint() { "$PYTHON" -m ruff check . && "$PYTHON" -m ruff format --check .; }
types() { "$PYTHON" -m mypy && "$PYTHON" -m mypy -p ci; }
matrix() { "$PYTHON" -m ci.matrix --check && "$PYTHON" -m pytest -q tests/test_matrix.py; }
docs() { "$PYTHON" -m ci.docs --check backends environment dispatch; }
cpu() { "$PYTHON" -m pytest -q -n "$JOBS" tests; }
rehearsal() {
    TRITON_INTERPRET=1 "$PYTHON" -m pytest -q -n "$JOBS" tests/test_properties.py tests/gpu
}
interpreter() { TRITON_INTERPRET=1 "$PYTHON" -m pytest -q -n "$JOBS" tests/kernels; }
compile() {
    "$PYTHON" -m dash_portable.audit --targets "$1" --jobs "$JOBS" --cache .cache/triton
}
audit() {
    compile quick && "$PYTHON" -m ci.docs --check kernels --targets quick --jobs "$JOBS"
}
audit-full() { compile all; }
kernels-page() { "$PYTHON" -m ci.docs --check kernels --jobs "$JOBS"; }
audit-nvidia() { compile sm80,sm86,sm89,sm90,sm100,sm120; }
intel() { bash ci/intel/run.sh; }
device() {
    "$PYTHON" -m pytest -q -n "$JOBS" tests tests/kernels --require-vendor "$LANE_VENDOR"
}
faults() { "$PYTHON" -m ci.seeded_faults; }

chosen=("$@")
[[ $# -gt 0 ]] || chosen=("${DEFAULT[@]}")
for step in "${chosen[@]}"; do
    if ! grep -q "^$step " <<<"$STEPS"; then
        echo "no step '$step'; the steps are:" >&2
        echo "$STEPS" >&2
        exit 2
    fi
done

begin=$SECONDS
if [[ -z "${PYTHON:-}" ]]; then
    echo "== install"
    install || {
        echo "install failed" >&2
        exit 1
    }
    PYTHON="$PWD/.venv/bin/python"
fi
export PYTHON
report="install $((SECONDS - begin)) s"
passed=0
failed=()
for step in "${chosen[@]}"; do
    echo "== $step"
    start=$SECONDS
    if "$step"; then passed=$((passed + 1)); else failed+=("$step"); fi
    report+=", $step $((SECONDS - start)) s"
done

echo "== times: $report, all $((SECONDS - begin)) s"
for step in ${failed[@]+"${failed[@]}"}; do
    echo "FAILED $step. Run it locally: bash ci/test.sh $step" >&2
done
echo "steps: $passed passed, ${#failed[@]} failed"
[[ ${#failed[@]} -eq 0 ]]
