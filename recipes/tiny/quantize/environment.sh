#!/usr/bin/env bash
# Makes the environment of one tool: environment.sh TOOL FOLDER [PIP OPTIONS...]
# TOOL is quark or llmcompressor; FOLDER/TOOL becomes a virtual environment with requirements-TOOL.txt. PIP OPTIONS
# say, for example, where a PyTorch for CPUs comes from, which is much smaller than the default one.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
if (($# < 2)) || [[ ! -f $here/requirements-$1.txt ]]; then
    sed -n '2,4s/^# //p' "${BASH_SOURCE[0]}" >&2
    exit 2
fi
tool=$1 folder=$2
shift 2
python3 -m venv "$folder/$tool"
"$folder/$tool/bin/pip" install --quiet --requirement "$here/requirements-$tool.txt" "$@"
echo "$folder/$tool/bin/python"
