"""llama.cpp and Hadron on the same shapes in one run: products, a layer of experts, a whole model.

    python benchmarks/peers/llama_cpp.py                            products and experts in MXFP4
    python benchmarks/peers/llama_cpp.py --bin llama.cpp/build/bin  where its programs are not on PATH
    python benchmarks/full_width.py small-mxfp4 CHECKPOINT          (once; needs the gguf package for the next)
    python benchmarks/peers/llama_cpp.py --model CHECKPOINT --gguf FOLDER

A case of Hadron and those of ggml take turns, so that they see the same machine; products of both are by the
same values. The model is that of CHECKPOINT in sizes: FOLDER gets a GGUF with random weights where it has none
yet, with MXFP4 experts and the rest in bf16 (as the checkpoint) and one with the rest in Q8_0. Nothing of
llama.cpp is needed but its programs and libggml.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import torch

import ggml_products as peer
import random_gguf
from hadron.bench import kernels, model, run
from hadron.bench.limits import Arena, Probes
from hadron.bench.measure import Case, measure
from hadron.bench.report import environment_lines, limits_text
from hadron.engine.config import EngineConfig
from hadron.errors import HadronError, UnsupportedError, UsageError
from hadron.quantization.scheme import MXFP4

PROGRAM = "llama-bench"
PARTS = ("products", "moe", "model")
RESTS = ("BF16", "Q8_0")
LINEAR_M = (1, 512)
PROMPT, STEPS = 128, 32
ROUNDS = 9  # of products; long ones end earlier
#: more than rounding of activations to int8 explains
FAR = 0.05
#: Bars that are ratios to llama.cpp, and the one of tokens a second.
MOE_BARS = {32: 2.0, 512: 2.4}
DECODE_BAR, PREFILL_BAR = 85 / 78, 350.0


class Bench(msgspec.Struct):
    """One test of `llama-bench -o json`. avg_ts: tokens a second."""

    n_prompt: int
    n_gen: int
    avg_ts: float
    n_depth: int = 0
    model_n_params: int = 0
    build_commit: str = "unknown"


@dataclass(frozen=True, slots=True)
class Line:
    """A row of the table. ours, theirs: what `unit` says; ratio: how many times as fast Hadron is."""

    case: str
    peer: str
    ours: float
    theirs: float
    unit: str
    ratio: float
    bar: str = ""

    def text(self) -> str:
        """Of a Markdown table."""
        figures = f"{self.ours:.2f} | {self.theirs:.2f} | {self.unit} | {self.ratio:.2f}"
        return f"| {self.case} | {self.peer} | {figures} | {self.bar} |"


HEAD = "| case | llama.cpp with | Hadron | llama.cpp | | ratio | bar |\n|---|---|---|---|---|---|---|"


def program(folder: Path | None) -> Path:
    """The path of llama-bench; `UsageError` where it is not there."""
    found = shutil.which(PROGRAM, path=None if folder is None else str(folder))
    if found is None:
        raise UsageError(
            "llama.cpp was not measured",
            where="PATH" if folder is None else f"--bin {folder}",
            found=f"no program named {PROGRAM}",
            accepted="llama.cpp's programs, built on this machine",
            hint="build llama.cpp, and give the folder of its programs with --bin",
        )
    return Path(found).resolve()


def bench(path: Path, gguf: Path, threads: int, *asked: str) -> list[Bench]:
    """What llama-bench measures; `UnsupportedError` where it fails or prints something else."""
    command = [str(path), "-m", str(gguf), "-t", str(threads), "-r", "3", "-o", "json", *asked]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        if done.returncode:
            raise ValueError(f"exit code {done.returncode}: {done.stderr.strip()[-300:]}")
        return msgspec.json.decode(done.stdout, type=list[Bench])
    except (ValueError, msgspec.MsgspecError) as error:
        raise UnsupportedError(
            f"{PROGRAM} did not measure the model",
            where=" ".join(command),
            found=str(error),
            accepted="a list of tests in JSON, as llama.cpp from September 2025 or later prints",
            hint="run the command; leave this GGUF out with --rest, or use another build of llama.cpp",
        ) from error


def rate(tests: Iterable[Bench], prompt: int, context: int, where: Path) -> float:
    """Tokens a second of a prompt, or (0) of generating behind a context; `UnsupportedError` where it was not run."""
    for test in tests:
        if test.n_depth == context and (test.n_prompt == prompt if prompt else test.n_gen > 0):
            return test.avg_ts
    raise UnsupportedError(
        f"{PROGRAM} left out a test",
        where=str(where),
        found=f"none of {f'a prompt of {prompt}' if prompt else 'generating'} behind {context} tokens",
        accepted="every test that was asked for",
        hint="use a newer llama.cpp",
    )


@dataclass(frozen=True, slots=True)
class Products:
    """Where products are measured. kinds: name and buffer type of ggml's ways."""

    ggml: peer.Ggml
    kinds: dict[str, int]
    probes: Probes
    arena: Arena
    wanted: kernels.Wanted
    isa: str

    def lines(self, cases: list[Case], shape: str, bars: dict[int, float]) -> Iterator[Line]:
        """Of one case of Hadron, followed by those of ggml, measured in turns."""
        ours, *theirs = measure(cases, self.probes, threads=self.wanted.threads, isa=self.isa, rounds=ROUNDS)
        for i, row in enumerate(theirs):
            bar = f"{bars[row.m]:.2f}" if row.m in bars and i == 0 else ""
            yield Line(f"{shape}, M = {row.m}", row.provider, ours.ms, row.ms, "ms", row.ms / ours.ms, bar)


def checked(case: Case, call: Callable[[int], None], result: Callable[[], torch.Tensor], name: str) -> Case:
    """ggml's case beside Hadron's; that both compute the same is looked at once."""
    call(0)
    expected = case.call(0)
    assert isinstance(expected, torch.Tensor)
    off = peer.difference(result(), expected)
    if not off < FAR:
        raise UnsupportedError(
            "ggml's product is not Hadron's",
            where=f"{case.op}, M = {case.m}, {case.k} -> {case.n}, {name}",
            found=f"a difference of {off:.3f} of the root mean square",
            accepted=f"at most {FAR}",
            hint="use another llama.cpp",
        )
    return replace(case, provider=name, call=call, warm=None)


def products(at: Products) -> Iterator[Line]:
    """Both shapes of `linear`; ggml's copies are as many as Hadron's, so that M = 1 is cold."""
    for cases in kernels.linear_groups(at.wanted, at.arena):
        n, k = cases[0].n, cases[0].k
        stored = kernels.random_weight(MXFP4, n, k)
        copies = max(2, at.arena.size // kernels.weight_bytes(stored))
        both = [[replace(case, warm=None)] for case in cases]
        with ExitStack() as held:
            for name, kind in at.kinds.items():
                layer = peer.Linear(at.ggml, kind, stored, copies)
                held.enter_context(layer.context)
                for row in both:
                    rest = held.enter_context(peer.Context(at.ggml, at.ggml.plain))
                    bound = layer.bind(rest, kernels.activations(row[0].m, k))
                    row.append(checked(row[0], *bound, name))
            for row in both:
                yield from at.lines(row, f"linear {k} → {n}", {})


def experts(at: Products) -> Iterator[Line]:
    """The layer of experts, in the first of ggml's ways (the others would take long)."""
    name, kind = next(iter(at.kinds.items()))
    for cases in kernels.moe_groups(at.wanted, at.arena):
        n, k, count = cases[0].n, cases[0].k, at.wanted.experts
        layer = peer.Experts(at.ggml, kind, *kernels.gated_weights(MXFP4, n, k), count)
        with layer.context:
            for case in cases:
                choices = [
                    kernels.choose(case.m, count, kernels.TOP_K, turn)
                    for turn in range(count // kernels.TOP_K if case.m == 1 else 1)
                ]
                weights = torch.full((case.m, kernels.TOP_K), 1 / kernels.TOP_K)
                with peer.Context(at.ggml, at.ggml.plain) as rest:
                    bound = layer.bind(rest, kernels.activations(case.m, k), choices, weights)
                    both = [case, checked(case, *bound, name)]
                    yield from at.lines(both, f"moe {k}/{n}, {case.shape}", MOE_BARS)


def measured_products(bench_path: Path, threads: int, parts: tuple[str, ...]) -> Iterator[str]:
    """The lines of products and experts, and what they are to be read with."""
    library = peer.library(bench_path.parent)
    with run.level_of(None) as isa, torch.inference_mode():
        ggml = peer.Ggml(library, threads)
        repacking = ggml.repacking()
        kinds = {} if repacking is None else {f"repacked ({repacking[1]})": repacking[0]}
        kinds["as mapped"] = ggml.plain
        wanted = kernels.Wanted(schemes=("mxfp4",), ms=LINEAR_M, threads=threads)
        size = max(run.ARENA, kernels.moe_bytes(wanted) if "moe" in parts else 0)
        arena = Arena(run.fitting(size))
        probes = Probes(arena, isa, threads)
        at = Products(ggml, kinds, probes, arena, replace(wanted, best_peak=probes.best_peak()), isa)
        if "products" in parts:
            yield from (line.text() for line in products(at))
        if "moe" in parts:
            moe = replace(at, wanted=replace(at.wanted, ms=kernels.MOE_M))
            yield from (line.text() for line in experts(moe))
        yield ""
        yield from (line.text for line in environment_lines(run.environment(threads, isa)))
        yield limits_text(probes.summary())


def ggufs(checkpoint: Path, folder: Path, rests: tuple[str, ...]) -> dict[str, Path]:
    """The GGUF of every type of the rest asked for, written where it is not there."""
    config_path = checkpoint / "config.json"
    if not config_path.exists():
        raise UsageError(
            "the model was not measured",
            where=f"--model {checkpoint}",
            found="no config.json in it",
            accepted="a checkpoint that full_width.py wrote",
            hint=f"python benchmarks/full_width.py small-mxfp4 {checkpoint}",
        )
    folder.mkdir(parents=True, exist_ok=True)
    paths = {rest: folder / f"{checkpoint.name}-{rest.lower()}.gguf" for rest in rests}
    for rest, path in paths.items():
        if not path.exists():
            partial = path.with_suffix(".partial")
            random_gguf.write(json.loads(config_path.read_text()), partial, rest)
            partial.rename(path)
    return paths


def hadron_rates(checkpoint: Path, threads: int, contexts: tuple[int, ...]) -> dict[tuple[int, int], float]:
    """(tokens, context) -> tokens a second, of steps of one token and of the prompt."""
    config = EngineConfig(prefault=True, threads=threads)
    decode = model.measure(checkpoint, config, model.Asked(contexts=contexts, steps=STEPS))
    prefill = model.measure(checkpoint, config, model.Asked(contexts=(0,), tokens=(PROMPT,), steps=3))
    return {(step.tokens, step.context): step.tokens_per_second for step in (*decode.steps, *prefill.steps)}


def models(path: Path, checkpoint: Path, paths: dict[str, Path], threads: int, contexts: tuple[int, ...],
           rounds: int) -> Iterator[Line]:  # fmt: skip
    """llama-bench on each GGUF and Hadron on the checkpoint, in turns; medians, of ratios too."""
    depths = ",".join(map(str, contexts))
    pairs: dict[tuple[int, int, str], list[tuple[float, float]]] = {}
    for _ in range(rounds):
        ours = hadron_rates(checkpoint, threads, contexts)
        for rest, gguf in paths.items():
            tests = bench(path, gguf, threads, "-p", str(PROMPT), "-n", "0")
            tests += bench(path, gguf, threads, "-p", "0", "-n", str(STEPS), "-d", depths)
            for (tokens, context), own in ours.items():
                theirs = rate(tests, tokens if tokens > 1 else 0, context, gguf)
                pairs.setdefault((tokens, context, rest), []).append((own, theirs))
    for (tokens, context, rest), found in sorted(pairs.items()):
        own, theirs = (statistics.median(one) for one in zip(*found, strict=True))
        ratio = statistics.median(a / b for a, b in found)
        case = f"decode behind {context}" if tokens == 1 else f"prompt of {tokens}"
        bar = f"{DECODE_BAR:.2f}" if tokens == 1 else f"{PREFILL_BAR:.0f} tokens/s"
        yield Line(case, f"MXFP4 experts, rest {rest}", own, theirs, "tokens/s", ratio, bar)


def numbers(text: str) -> tuple[int, ...]:
    """Of a list with commas."""
    return tuple(int(word) for word in text.split(","))


def some(*names: str) -> Callable[[str], tuple[str, ...]]:
    """What reads a list of these with commas."""

    def read(text: str) -> tuple[str, ...]:
        chosen = tuple(text.split(","))
        unknown = sorted(set(chosen) - set(names))
        if unknown:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(names)}")
        return chosen

    return read


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    """The command line; the model is left out without --model, unless it was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bin", type=Path, help="the folder of llama.cpp's programs, instead of PATH")
    parser.add_argument("--model", type=Path, metavar="CHECKPOINT", help="a checkpoint that full_width.py wrote")
    parser.add_argument("--gguf", type=Path, metavar="FOLDER", help="where the GGUFs of its sizes are, or go")
    parser.add_argument("--only", type=some(*PARTS), help="some of " + ",".join(PARTS))
    parser.add_argument("--rest", type=some(*RESTS), default=RESTS, help="of the GGUFs: some of " + ",".join(RESTS))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--contexts", type=numbers, default=(0, 1024), help="tokens before a step, as 0,1024")
    parser.add_argument("--rounds", type=int, default=3, help="of the model")
    options = parser.parse_args(words)
    if (options.model is None) != (options.gguf is None):
        parser.error("--model and --gguf belong together: a checkpoint, and the folder of its GGUFs")
    if options.only is None:
        options.only = PARTS if options.model else PARTS[:2]
    elif "model" in options.only and options.model is None:
        parser.error("--only model needs --model CHECKPOINT and --gguf FOLDER")
    return options


def main(words: list[str] | None = None) -> int:
    """Measure and print as it comes; exit code 2, with the reason, where something is missing."""
    options = arguments(words)
    try:
        path = program(options.bin)
        paths = ggufs(options.model, options.gguf, options.rest) if "model" in options.only else {}
        print(HEAD)
        if paths:
            found = models(path, options.model, paths, options.threads, options.contexts, options.rounds)
            for line in found:
                print(line.text(), flush=True)
        if set(options.only) != {"model"}:
            for text in measured_products(path, options.threads, options.only):
                print(text, flush=True)
    except HadronError as error:
        print(error)
        return error.exit_code
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
