#!/usr/bin/env bash
# Builds the native kernels with the address and undefined-behaviour sanitizers and runs their tests on them.
# Needs the environment in .venv with the test requirements, nanobind, cmake and ninja or make.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
build=build/sanitize
cmake -S . -B "$build" -DPython_EXECUTABLE="$PWD/$python" -DHADRON_SANITIZE=ON -DCMAKE_BUILD_TYPE=RelWithDebInfo >/dev/null
cmake --build "$build" --parallel 2 >/dev/null
package=$("$python" -c 'import hadron.kernels.cpu as p; print(p.__path__[0])')
mkdir -p "$build/hadron" && rm -rf "$build/hadron/kernels"
overlay=$(realpath "$build")/overlay
rm -rf "$overlay" && mkdir -p "$overlay" && cp -r "$package/../.." "$overlay/hadron"
rm -f "$overlay"/hadron/kernels/cpu/_native*.so && cp "$build"/_native*.so "$overlay/hadron/kernels/cpu/"
runtime=$(c++ -print-file-name=libasan.so)
# Python and torch leak on purpose at exit; torch's own code is not instrumented.
LD_PRELOAD=$runtime:$(c++ -print-file-name=libubsan.so) ASAN_OPTIONS=detect_leaks=0 \
    UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1 PYTHONPATH=$overlay OMP_NUM_THREADS=2 \
    "$python" -m pytest -q -p no:cacheprovider tests/kernels/test_native*.py "$@"
