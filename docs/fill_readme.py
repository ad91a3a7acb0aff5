"""Run the README's commands and snippets and write their output into it; with `--check`, compare.

`console` blocks hold `$ hadron …` lines, each followed by its output; a `python` block may be followed by
a `text` block with what it prints. `sh` blocks set up a clone and are not run here. Figures of the machine
are masked by one rule: a line that starts with `machine`, and the indented lines that continue it, count
as that word alone.
"""

from __future__ import annotations

import difflib
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)


def filled(text: str) -> str:
    """`text` with the output of every command and snippet as it is now."""
    printed: str | None = None  # by the snippet just before

    def fill(match: re.Match[str]) -> str:
        nonlocal printed
        language, body = match[1], match[2]
        if language == "console":
            body = "".join(f"$ {line}\n{run_command(line)}" for line in commands(body))
        elif language == "text" and printed is not None:
            body = printed
        printed = run_snippet(match[2]) if language == "python" else None
        return f"```{language}\n{body}```"

    return _FENCE.sub(fill, text)


def commands(body: str) -> list[str]:
    """The commands of a console block."""
    return [line.removeprefix("$ ") for line in body.splitlines() if line.startswith("$ ")]


def run_command(line: str) -> str:
    """What a `hadron` command prints."""
    program, *arguments = shlex.split(line)
    if program != "hadron":
        raise ValueError(f"only `hadron` commands are shown with their output, not {line!r}")
    return _output([sys.executable, "-m", "hadron", *arguments])


def run_snippet(code: str) -> str:
    """What a snippet prints; warnings are errors."""
    return _output([sys.executable, "-W", "error", "-c", code])


def _output(arguments: list[str]) -> str:
    environment = {k: v for k, v in os.environ.items() if k not in ("FORCE_COLOR", "NO_COLOR")}
    done = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, check=False, env=environment)
    if done.returncode not in (0, 1) or "Traceback" in done.stderr:
        raise RuntimeError(f"{arguments} ended with {done.returncode}:\n{done.stderr}")
    return done.stdout


def masked(text: str) -> list[str]:
    """Lines without the machine's figures."""
    lines: list[str] = []
    continues = False
    for line in text.splitlines():
        continues = line.startswith("machine ") or (continues and line.startswith(" "))
        if not continues:
            lines.append(line.rstrip())
        elif line.startswith("machine "):
            lines.append("machine")
    return lines


def difference(before: str, after: str) -> str:
    """A unified diff under the mask; empty when nothing differs."""
    return "\n".join(difflib.unified_diff(masked(before), masked(after), "README.md", "as run", lineterm=""))


def main() -> int:
    """Write the file, or compare it."""
    text = README.read_text()
    now = filled(text)
    if "--check" not in sys.argv[1:]:
        README.write_text(now)
        return 0
    print(difference(text, now))  # noqa: T201
    return 1 if difference(text, now) else 0


if __name__ == "__main__":
    sys.exit(main())
