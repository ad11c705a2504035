#!/usr/bin/env bash
# The Intel lane on a machine without an Intel GPU: the same kernels through Intel's own build of Triton.
#
#   bash ci/intel/run.sh                    all of it
#   ONLY=select_decode_bf16 bash ci/intel/run.sh    one case
#   CASES=module:NAME ...                   another table of cases
#   LIMIT=900 ...                           seconds of processor time for one compile (120; native 180)
#   bash ci/intel/run.sh --write            write docs/kernels-intel.md instead of checking it
#
# 1. SPIR-V for pvc and dg2, and for a device without matrix unit ("generic")
# 2. native code for PVC and Arc A by Intel's offline compiler, its spills recorded
# 3. the generic modules executed on the CPU through OpenCL, held to the NumPy brute force
# 4. docs/kernels-intel.md is what this run found
#
# What it does not say: this is Triton 3.3, and no code for Battlemage (B580) or Lunar Lake is built natively.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
home=.cache/intel
out="$home/out"
cases="${CASES:-dash_portable.kernels.cases:CASES}"
if [[ "${1:-}" == --write ]]; then check=(); else check=(--check); fi

bash ci/intel/prepare.sh "$home" || exit 1
rm -rf "$out"
failed=()
step() { # name, command...
    local name="$1" start=$SECONDS
    shift
    echo "-- $name"
    "$@" || failed+=("$name")
    echo "-- $name: $((SECONDS - start)) s"
}

compile() { # targets, JSON, further arguments
    local targets="$1" report="$2"
    shift 2
    "$home/xpu/bin/python" -m dash_portable.audit --cases "$cases" --targets "$targets" \
        --jobs "${DASH_JOBS:-2}" --limit "${LIMIT:-120}" --cache "$home/triton" --dump "$out/spirv" --json "$report" "$@"
}

execute() {
    local icd="$home/icd"
    mkdir -p "$icd"
    # The wheel's own .icd file names a folder that does not exist.
    echo "$PWD/$home/ocl/lib/libintelocl.so" >"$icd/intel.icd"
    # More than this machine has: the test beyond 2**31 elements touches only a few pages of what it asks for.
    CL_CONFIG_CPU_FORCE_MAX_MEM_ALLOC_SIZE=64GB CL_CONFIG_CPU_FORCE_GLOBAL_MEM_SIZE=128GB \
        OCL_ICD_VENDORS="$PWD/$icd" LD_LIBRARY_PATH="$PWD/$home/ocl/lib:${LD_LIBRARY_PATH:-}" \
        DASH_INTEL_MODULES="$PWD/$out/cpu" DASH_INTEL_BINARIES="$PWD/$home/binaries" \
        "$home/ocl/bin/python" -m pytest -q -ra -c ci/intel/pytest.ini --rootdir . \
        --confcutdir tests/intel ${ONLY:+-k "${ONLY//,/ or }" -o empty_parameter_set_mark=skip} tests/intel
}

# With 32 warps a lane holds few elements: the CPU's compiler takes a second for such a module, and more than six
# minutes for the same kernel with one warp. The merge of selection is the other way round: Triton itself takes two
# minutes for it with 32 warps, two seconds with 8.
for_cpu() {
    local wide few status=0
    wide="$(grep -vx select_merge <<<"$names" | paste -sd,)"
    few="$(grep -x select_merge <<<"$names")"
    if [[ -n "$wide" ]]; then compile generic "$out/generic.json" --warps 32 --only "$wide" || status=1; fi
    if [[ -n "$few" ]]; then compile generic "$out/generic-few.json" --warps 8 --only "$few" || status=1; fi
    return "$status"
}

mkdir -p "$out"
names="$("$home/xpu/bin/python" -c 'import importlib, sys
module, _, table = sys.argv[1].partition(":")
print(*getattr(importlib.import_module(module), table), sep="\n")' "$cases")"
[[ -n "${ONLY:-}" ]] && names="$(tr , '\n' <<<"$ONLY")"
step "SPIR-V for cards" compile pvc,dg2 "$out/audit.json" --only "$(paste -sd, <<<"$names")"
step "SPIR-V for the CPU" for_cpu
step "native code" python3 -m ci.intel.spirv native "$out/spirv" --home "$home" --limit "${LIMIT:-180}"
step "strip" python3 -m ci.intel.spirv strip "$out/spirv" "$out/cpu" --home "$home"
step "execution" execute
[[ -n "${ONLY:-}${CASES:-}" ]] || step "page" python3 -m ci.docs ${check[@]+"${check[@]}"} intel --from "$out"
if [[ ${#failed[@]} -gt 0 ]]; then
    echo "Intel lane failed: ${failed[*]}. Run it locally: bash ci/test.sh intel" >&2
    exit 1
fi
