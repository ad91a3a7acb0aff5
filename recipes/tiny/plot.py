"""Draws the loss curve and accuracies of a training's log as an image."""

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

KINDS = ("problem", "tool", "retrieval", "talk")


def main() -> None:
    """Reads the command line, writes the image; its suffix says the format."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("log", type=Path, help="log.jsonl of a training")
    parser.add_argument("image", type=Path, help="for example loss.svg or loss.png")
    parser.add_argument("--title", default="Training of a tiny model")
    options = parser.parse_args()
    rows = {row["step"]: row for row in map(json.loads, options.log.read_text().splitlines())}.values()
    figure, (losses, accuracy) = plt.subplots(2, 1, figsize=(9, 7), sharex=True, layout="constrained")
    named = [("loss", "all, weighted"), ("mtp_loss", "MTP"), ("indexer_kl", "indexer KL")]
    named += [(f"{kind}_loss", f"answers: {kind}") for kind in KINDS]
    for key, label in named:
        points = [(row["step"], row[key]) for row in rows if row.get(key)]
        if points:
            losses.plot(*zip(*points, strict=True), label=label, linewidth=1)
    losses.set_yscale("log")
    losses.set_ylabel("loss a token (nats)")
    for key, label in [(f"{kind}_exact", f"exact: {kind}") for kind in KINDS] + [("mtp_acceptance", "MTP acceptance")]:
        points = [(row["step"], row[key]) for row in rows if key in row]
        if points:
            accuracy.plot(*zip(*points, strict=True), label=label, linewidth=1)
    accuracy.set_ylabel("share, training batches")
    accuracy.set_xlabel("step")
    starts: dict[str, int] = {}
    for row in rows:
        starts.setdefault(row["stage"], row["step"])
    for axes in (losses, accuracy):
        for step in list(starts.values())[1:]:
            axes.axvline(step, color="grey", linewidth=0.8, linestyle=":")
        axes.legend(fontsize="small", ncols=2)
        axes.grid(alpha=0.3)
    figure.suptitle(options.title)
    figure.savefig(options.image, dpi=150)


if __name__ == "__main__":
    main()
