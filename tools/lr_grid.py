"""The learning-rate grids of notebooks 07 and 08, on a seed that they do not use: published/lr_grid.csv.

`python tools/lr_grid.py` takes about ten minutes on 2 cores; the pipeline only reads its table. The settings are those
of params.yaml. Runs are kept in build/lr_grid, so that a run that was cut goes on.
"""
import csv

from ruamel.yaml import YAML

from klnb import paths, training

SEEDS = [100]
GRIDS = {  # section: (names, betas, rates)
    "07_distillation": (None, [1.0], [2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3]),
    "08_math_reward": (["none", "reward-to-go"], [0.0, 0.05], [5e-4, 1e-3, 2e-3]),
}


def main():
    params, rows = YAML(typ="safe", pure=True).load(paths.PARAMS.read_text()), []
    for section, (names, betas, rates) in GRIDS.items():
        train = params[section]["train"] | {"eval_every": params[section]["train"]["steps"]}
        runs = {}
        for name in names or params[section]["names"]:
            for lr in rates:
                made = training.specs(train | {"lr": lr}, SEEDS, name, betas)
                runs |= {f"{name}-{lr:g}-{file}": s for file, s in made.items()}
        for run in training.sweep(runs, paths.BUILD / "lr_grid" / section, processes=3):
            done, end = run["settings"], {m: f"{v[0]:.5g}" for m, v in run["evals"][-1].items() if m != "step"}
            rows.append({"section": section, **{k: done[k] for k in ("name", "beta", "lr", "seed")}, **end})
    paths.PUBLISHED.mkdir(exist_ok=True)
    with open(paths.PUBLISHED / "lr_grid.csv", "w", newline="") as file:
        out = csv.DictWriter(file, rows[0], lineterminator="\n")
        out.writeheader()
        out.writerows(rows)


if __name__ == "__main__":
    main()
