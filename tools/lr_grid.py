"""The learning-rate grid of notebook 07, on seeds that it does not use: published/lr_grid.csv.

`python tools/lr_grid.py` takes about half an hour on 2 cores; the pipeline only reads its table. The settings are those
of params.yaml, 07_distillation. Runs are kept in build/lr_grid, so that a run that was cut goes on.
"""
import csv

from ruamel.yaml import YAML

from klnb import paths, training

RATES = (5e-4, 1e-3, 2e-3, 4e-3)
SEEDS = (100, 101)


def main():
    section = YAML(typ="safe", pure=True).load(paths.PARAMS.read_text())["07_distillation"]
    rows = []
    for name in section["names"]:
        for lr in RATES:
            runs = training.specs(section["train"] | {"lr": lr}, SEEDS, name)
            for run in training.sweep(runs, paths.BUILD / f"lr_grid/{name}-{lr:g}", processes=2):
                end = {m: f"{v[0]:.5g}" for m, v in run["evals"][-1].items() if m != "step"}
                rows.append({"name": name, "lr": lr, "seed": run["settings"]["seed"], **end})
    paths.PUBLISHED.mkdir(exist_ok=True)
    with open(paths.PUBLISHED / "lr_grid.csv", "w", newline="") as file:
        out = csv.DictWriter(file, rows[0], lineterminator="\n")
        out.writeheader()
        out.writerows(rows)


if __name__ == "__main__":
    main()
