"""Trains a tiny model from scratch; see README.md for the commands that made the published ones."""

import argparse
import json
import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

# One thread a process: set before torch is loaded.
os.environ["OMP_NUM_THREADS"] = "1"

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from training import state as states
from training.config import MODELS, with_vocabulary
from training.export import export
from training.loop import Plan, Trainer


def _tokenizer_facts(data: Path) -> tuple[int, int]:
    """Tokens of the tokenizer, and the padding token."""
    tokenizer = json.loads((data / "tokenizer.json").read_text())
    ids = dict(tokenizer["model"]["vocab"])
    ids |= {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    return max(ids.values()) + 1, ids["<|endoftext|>"]


def _work(rank: int, options: argparse.Namespace, plan: Plan, meeting: str) -> None:
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    if plan.processes > 1:
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=plan.processes)
    tokens, pad = _tokenizer_facts(options.data)
    stored = states.load(options.out / "state.pt") if options.resume else None
    config = stored["config"] if stored else with_vocabulary(MODELS[options.model], tokens)
    trainer = Trainer(config, plan, options.data, pad, rank)
    if stored:
        trainer.resume(stored)
    elif rank == 0:
        size = sum(p.numel() for p in trainer.model.parameters())
        print(f"{options.model}: {size / 1e6:.2f} M parameters, {plan}", flush=True)
    seconds = None if options.stop_after_minutes is None else 60 * options.stop_after_minutes
    finished = trainer.run(options.out, seconds, options.log_every, options.save_every)
    if rank == 0 and finished:
        export(trainer.model, options.data, options.out / "checkpoint")
    if plan.processes > 1:
        dist.destroy_process_group()


def _plan(options: argparse.Namespace) -> Plan:
    if options.resume:
        stored: dict[str, Any] = states.load(options.out / "state.pt")["plan"]
        return Plan(**stored)
    plan = Plan(steps=options.steps, seed=options.seed, processes=options.processes, dtype=options.dtype)
    return plan if options.tokens is None else replace(plan, tokens=options.tokens)


def main() -> None:
    """Reads the command line, starts the processes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=sorted(MODELS))
    parser.add_argument("--data", type=Path, required=True, help="folder that make_data.py wrote")
    parser.add_argument("--out", type=Path, required=True, help="folder for state.pt, log.jsonl and checkpoint/")
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--processes", type=int, default=2, help="one a core")
    parser.add_argument("--tokens", type=int, help="tokens a process and step, a multiple of 1536")
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float32"),
        default="bfloat16",
        help="of the arithmetic; float32 is faster on a processor without bfloat16 products",
    )
    parser.add_argument("--resume", action="store_true", help="go on from state.pt in --out")
    parser.add_argument("--stop-after-minutes", type=float, help="save and stop; --resume goes on")
    parser.add_argument("--log-every", type=int, default=20, metavar="STEPS")
    parser.add_argument("--save-every", type=int, default=200, metavar="STEPS")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    plan = _plan(options)
    if plan.processes == 1:
        _work(0, options, plan, "")
        return
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_work, args=(options, plan, str(Path(folder) / "meeting")), nprocs=plan.processes)


if __name__ == "__main__":
    main()
