#!/usr/bin/env bash
# Make or refresh .venv with this checkout and its dependencies; the other scripts source it.
# Needs Python >= 3.11.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
extras="${1:-}"
python="${PYTHON:-python3}"
"$python" -c '
import sys
assert sys.version_info >= (3, 11), f"Python >= 3.11 is needed, this is {sys.version.split()[0]}"
'
# With compiled files the imports of SGLang take a quarter of the time.
unset PYTHONDONTWRITEBYTECODE
if [ ! -x "$root/.venv/bin/python" ]; then
    "$python" -m venv "$root/.venv"
fi
stamp="$root/.venv/installed$extras"
if [ ! -f "$stamp" ] || [ "$root/pyproject.toml" -nt "$stamp" ] ||
    [ "$root/constraints.txt" -nt "$stamp" ]; then
    # An environment that was made by hand has no uv.
    "$root/.venv/bin/python" -m uv --version >/dev/null 2>&1 ||
        "$root/.venv/bin/python" -m pip install -q uv
    "$root/.venv/bin/python" -m uv pip install -q --python "$root/.venv/bin/python" \
        -c "$root/constraints.txt" -e "$root$extras"
    touch "$stamp"
fi
export PATH="$root/.venv/bin:$PATH"
