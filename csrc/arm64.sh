#!/usr/bin/env bash
# Builds the native kernels for ARM64, warnings as errors, and runs their tests on them under emulation.
#
#   csrc/arm64.sh [pytest's arguments]   builds; tests, if build/arm64/root is there
#   csrc/arm64.sh root [arguments]       before, makes build/arm64/root: Python and what the tests import, for ARM64
#
# Building needs g++-aarch64-linux-gnu, cmake, ninja or make, and the environment in .venv with nanobind.
# Tests need qemu-user (or qemu-user-static) too, and `root` debootstrap, root's rights and Python 3.11 or 3.13,
# which Debian has. All tests of kernels take a quarter of an hour; files and `-k` choose some.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
mkdir -p build/arm64
build=$(realpath build/arm64)
root=$build/root

make_root() {
    local release needs platforms=()
    case $version in
        3.11) release=bookworm ;;
        3.13) release=trixie ;;
        *) echo "no Debian has Python $version: give PYTHON= one of 3.11 or 3.13" >&2 && return 1 ;;
    esac
    rm -rf "$root" "$root.part"
    # Only unpacked: nothing of it runs but Python.
    debootstrap --foreign --arch=arm64 --variant=minbase --include=python3,libgomp1,libstdc++6 "$release" "$root.part"
    find "$root.part/var/cache/apt/archives" -name '*.deb' -exec dpkg-deb -x {} "$root.part" \;
    for glibc in 2_17 2_24 2_26 2_27 2_28 2_31 2_34; do platforms+=(--platform "manylinux_${glibc}_aarch64"); done
    local install=("$python" -m pip install -q --target "$root.part/site" --only-binary=:all: "${platforms[@]}")
    mapfile -t needs < <("$python" -c 'if True:
        import tomllib
        project = tomllib.load(open("pyproject.toml", "rb"))["project"]
        needs = project["dependencies"] + project["optional-dependencies"]["test"]
        print(*(need for need in needs if not need.startswith("torch")), sep="\n")')
    # The last torch whose wheel for ARM64 needs no libraries of a GPU; pip would take those for this processor.
    "${install[@]}" --no-deps 'torch==2.10.*'
    "${install[@]}" "${needs[@]}" filelock typing-extensions sympy networkx fsspec
    mv "$root.part" "$root"
}

compile() {
    local include config
    include=$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')
    # Debian keeps pyconfig.h apart for each processor; those of 64-bit Linux agree in what matters here.
    for config in "$include"/../*-linux-gnu/"${include##*/}"/pyconfig.h; do
        [[ ! -f $config ]] || install -D "$config" "$build/include/aarch64-linux-gnu/${include##*/}/pyconfig.h"
    done
    cmake -S . -B "$build/kernels" -DPython_EXECUTABLE="$(realpath -s "$python")" -DPython_INCLUDE_DIR="$include" \
        -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ \
        -DCMAKE_CXX_FLAGS="-idirafter $build/include" -DCMAKE_BUILD_TYPE=Release >/dev/null
    cmake --build "$build/kernels" --parallel 2
}

emulate() {
    local qemu
    if ! qemu=$(command -v qemu-aarch64 || command -v qemu-aarch64-static); then
        echo "no qemu-aarch64: install qemu-user" >&2
        return 1
    fi
    rm -rf "$build/overlay" && mkdir "$build/overlay" && cp -r src/hadron "$build/overlay"
    rm -f "$build"/overlay/hadron/kernels/cpu/_native*.so
    cp "$build"/kernels/_native*.so "$build/overlay/hadron/kernels/cpu/_native.so"
    # By its name Python starts itself again, where a test does.
    cat >"$build/python" <<EOF
#!/bin/sh
PYTHONHOME='$root/usr' PYTHONPATH='$build/overlay:$root/site' exec '$qemu' -L '$root' -0 "\$0" '$root/usr/bin/python$version' "\$@"
EOF
    chmod +x "$build/python"
    (($#)) || set -- tests/kernels/test_native*.py
    OMP_NUM_THREADS=1 "$build/python" -m pytest -q -p no:cacheprovider --timeout 3600 --hypothesis-profile=ci "$@"
}

if [[ ${1:-} == root ]]; then
    make_root
    shift
fi
compile
if [[ -d $root ]]; then emulate "$@"; fi
