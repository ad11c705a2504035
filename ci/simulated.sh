#!/usr/bin/env bash
# Every lane that is on, one after the other, with the Python that is here: all targets, the oldest and the newest
# Triton and torch, the Intel lane, the planted faults. The times go to .cache/simulated.txt.
#
#   bash ci/simulated.sh               all lanes whose Python is here
#   bash ci/simulated.sh audit cpu     only lanes whose name begins with one of these
#
# A lane that wants a Python that is not here is named and left out: only its container or runner has it. With
# ANY_PYTHON=1 it runs with the Python that is here instead. With pyenv, all of its versions are here so:
#
#   PYENV_VERSION=3.11:3.10:3.12:3.13 bash ci/simulated.sh
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
mkdir -p .cache
report=.cache/simulated.txt
: >"$report"
names="$(python3 -m ci.matrix --names)" || exit 1 # it says what is wrong with which lane
have="$(python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])')"
passed=0 failed=0 left=0
begin=$SECONDS
while read -r lane python; do
    if [[ $# -gt 0 ]]; then
        wanted=0
        for prefix in "$@"; do [[ "$lane" == "$prefix"* ]] && wanted=1; done
        [[ $wanted == 1 ]] || continue
    fi
    if ! "python$python" --version >/dev/null 2>&1 && [[ "$have" != "$python" && -z "${ANY_PYTHON:-}" ]]; then
        echo "left out  $lane (no Python $python here)" | tee -a "$report"
        left=$((left + 1))
        continue
    fi
    start=$SECONDS
    echo "==== $lane"
    command=(bash ci/lane.sh "$lane")
    [[ -n "${ANY_PYTHON:-}" ]] && command=(env PYTHON=python3 "${command[@]}")
    if "${command[@]}" </dev/null; then
        passed=$((passed + 1)) state="passed"
    else
        failed=$((failed + 1)) state="FAILED"
    fi
    echo "$state    $lane $((SECONDS - start)) s" >>"$report"
done <<<"$names"
echo "all $((SECONDS - begin)) s" >>"$report"
cat "$report"
echo "lanes: $passed passed, $failed failed, $left skipped"
if [[ $((passed + failed)) -eq 0 ]]; then
    lanes="$(cut -d' ' -f1 <<<"$names" | tr '\n' ' ')"
    echo "no lane was run: found ${*:-no Python that a lane wants}, needed the beginning of one of $lanes" >&2
    exit 1
fi
[[ $failed -eq 0 ]]
