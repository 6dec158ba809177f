#!/usr/bin/env bash
# Makes .venv with everything locked in requirements/all.txt. Repeatable: does nothing when .venv is current.
set -euo pipefail
cd "$(dirname "$0")/.."
python="${PYTHON:-python3}"
uv_version="0.13.9"

fail() { echo "setup: $*" >&2; exit 1; }

"$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null ||
  fail "Python 3.11 to 3.13 is needed, '$python' is $("$python" -V 2>&1). Set PYTHON=/path/to/python3.11"

stamp=".venv/.specserve-$(cat requirements/all.txt pyproject.toml hack/setup.sh | sha256sum | cut -c1-16)"
[ -f "$stamp" ] && exit 0

retry() { # downloads of gigabytes fail now and then; what has arrived is kept in the cache
  local try
  for try in 1 2 3; do
    "$@" && return 0
    echo "setup: attempt $try of 3 failed: $*" >&2
    sleep $((try * 5))
  done
  return 1
}

free_kib=$(df -Pk . | awk 'NR == 2 {print $4}')
[ -d .venv ] || [ "$free_kib" -gt 12582912 ] || fail "about 12 GiB of free disk are needed here, $((free_kib / 1048576)) GiB are left"

echo "setup: installing into .venv (about 3 GB of downloads, 8 GB of disk; minutes, once)"
[ -x .venv/bin/python ] || "$python" -m venv .venv
rm -f .venv/.specserve-*
[ -x .venv/bin/uv ] || retry .venv/bin/pip install --quiet "uv==$uv_version" || fail "could not install uv"
export UV_HTTP_TIMEOUT=600 UV_LINK_MODE=copy VIRTUAL_ENV="$PWD/.venv"
if [ "$(stat -c %d "$(.venv/bin/uv cache dir 2>/dev/null || echo "$HOME")" 2>/dev/null)" = "$(stat -c %d .venv)" ]; then
  export UV_LINK_MODE=hardlink
fi
retry .venv/bin/uv pip install --quiet --no-deps --require-hashes -r requirements/all.txt || fail "could not install the locked packages"
.venv/bin/uv pip install --quiet --no-deps --no-build-isolation -e . || fail "could not install specserve itself"
touch "$stamp"
echo "setup: done"
