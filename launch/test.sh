#!/usr/bin/env bash
# The tests, in .venv: bash launch/test.sh [pytest arguments]. `-m fast` runs those without a server.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh" "[dev]"
cd "$root"
# As the plain-CPU platform does: threads of small matrix products spin on a core that other
# processes need.
cores="$(getconf _NPROCESSORS_ONLN)"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((cores > 1 ? cores - 1 : 1))}"
# Two processes; tests that use the same server run in the same one, in the order that
# tests/engine/conftest.py chooses.
exec python -W ignore -m pytest -n 2 --dist loadgroup --no-loadscope-reorder "$@"
