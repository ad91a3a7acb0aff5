"""Makes every variant of both families, runs `hadron check` on each, and prints their sizes.

python all.py ENVIRONMENTS OUT [--flash BF16_FOLDER] [--glm52 BF16_FOLDER]

ENVIRONMENTS is the folder that environment.sh filled; `hadron` must be installed for the Python that runs this. The
exit code is 1 where a variant could not be made or `check` refuses it; the others are made all the same.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
#: model -> variants: script, and the environment it needs, if any
VARIANTS = {
    "flash": (("fp8_block", None), ("quark_mxfp4_blockfp8", "quark"), ("nvfp4", "llmcompressor")),
    "glm52": (("fp8_block", None), ("quark_mxfp4_ptpc", "quark"), ("nvfp4", "llmcompressor")),
}


def weights(folder: Path) -> int:
    """Bytes of the files of weights."""
    return sum(file.stat().st_size for file in folder.glob("model*.safetensors"))


def make(script: str, tool: str | None, environments: Path, source: Path, out: Path) -> str | None:
    """Makes and checks one variant; what went wrong, or None."""
    python = environments / tool / "bin" / "python" if tool else Path(sys.executable)
    if not python.exists():
        return f"{python} is missing: run environment.sh {tool} {environments}"
    if subprocess.run([python, HERE / f"{script}.py", source, out], check=False).returncode:
        return f"{script}.py failed"
    if subprocess.run([sys.executable, "-m", "hadron", "check", out], check=False).returncode:
        return "hadron check refuses it"
    return None


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("environments", type=Path)
    parser.add_argument("out", type=Path)
    for model in VARIANTS:
        parser.add_argument(f"--{model}", type=Path, help="its trained BF16 checkpoint")
    options = parser.parse_args()
    lines, failed = [], False
    for model, variants in VARIANTS.items():
        source = getattr(options, model)
        if source is None:
            continue
        lines.append(f"{weights(source):>12,}  {source}")
        for script, tool in variants:
            out = options.out / f"{model}-{script.replace('_', '-')}"
            problem = make(script, tool, options.environments, source, out)
            lines.append(f"FAILED: {out}: {problem}" if problem else f"{weights(out):>12,}  {out}")
            failed = failed or problem is not None
    sys.stdout.write("\n".join(["", "bytes of weights", *lines, ""]))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
