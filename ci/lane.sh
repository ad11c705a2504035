#!/usr/bin/env bash
# One lane of ci/vendors.json: install, prove that the lane's vendor is really there, check, show the choice.
#
#   bash ci/lane.sh LANE               `python -m ci.matrix --list` names them
#   PYTHON=python3 bash ci/lane.sh LANE     with this Python instead of the lane's (a dry run)
#
# The environment is kept in .cache/lanes/LANE and made anew when the lane's row changes.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
lane="${1:?usage: bash ci/lane.sh LANE}"
trap 'echo "lane $lane FAILED. Run it locally: bash ci/lane.sh $lane" >&2' ERR

python="${PYTHON:-python3}"
row="$("$python" -m ci.matrix --shell "$lane")"
eval "$row"
if [[ -z "${PYTHON:-}" && "$LANE_TORCH" != image ]]; then
    python="python$LANE_PYTHON"
    "$python" --version >/dev/null 2>&1 || python=python3 # a shim of pyenv may be there and refuse
    have="$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')"
    if [[ "$have" != "$LANE_PYTHON" ]]; then
        echo "lane $lane wants Python $LANE_PYTHON, found $have; PYTHON=python3 runs it anyway" >&2
        false
    fi
fi

home=".cache/lanes/$lane"
asked="$(cat <<<"$row"; cat constraints.txt pyproject.toml; "$python" --version)"
if [[ "$(cat "$home/asked" 2>/dev/null)" != "$asked" ]]; then
    rm -rf "$home"
    "$python" -m venv "$home"
    pip=("$home/bin/python" -m pip install --quiet)
    # A lane chooses its own torch and Triton: the constraints hold for everything else.
    others="$home/constraints.txt"
    grep -vE '^(torch|triton)==' constraints.txt >"$others"
    if [[ "$LANE_TORCH" == image ]]; then
        # The image's torch may live in an environment of its own, of which one made from it knows nothing.
        packages="$("$home/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
        "$python" -c 'import site; print(*site.getsitepackages(), sep="\n")' >"$packages/image.pth"
        # An extra that wants another torch fails here instead of replacing it.
        "$python" -c 'import importlib.metadata as m; print("torch==" + m.version("torch"))' >>"$others"
    fi
    [[ "$LANE_TORCH" =~ ^[0-9] ]] && "${pip[@]}" --constraint "$others" "torch==$LANE_TORCH"
    # torch declares one Triton; the lane's may be another one, on purpose.
    [[ "$LANE_TRITON" =~ ^[0-9] ]] && "${pip[@]}" --no-deps "triton==$LANE_TRITON"
    extras="test,cli,plot"
    # The cpu extra would bring torch again; nothing else is in it.
    [[ "$LANE_EXTRA" != cpu ]] && extras+=",$LANE_EXTRA"
    "${pip[@]}" --constraint "$others" numpy --editable ".[$extras]"
    echo "$asked" >"$home/asked"
fi
export PYTHON="$PWD/$home/bin/python" LANE_VENDOR LANE_ARCH

if [[ "$LANE_TORCH" != none ]]; then
    "$PYTHON" -m dash_portable doctor --json >"$home/doctor.json"
    "$PYTHON" -m ci.prove "$lane" "$home/doctor.json"
fi
read -ra check <<<"$LANE_CHECK"
bash ci/test.sh "${check[@]}"
if [[ "$LANE_TORCH" != none ]]; then
    "$PYTHON" -m dash_portable explain
fi
