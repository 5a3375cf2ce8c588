"""The learning-rate grids of notebooks 07 and 08 and of scale smollm2, on seeds that they do not use, as data in git:
published/lr_grid.csv.

`python tools/lr_grid.py` takes about ten minutes on 2 cores; the pipeline only reads its table. The settings are those
of params.yaml. Runs are kept in build/lr_grid, so that a run that was cut goes on.
"""
import argparse
import csv

from ruamel.yaml import YAML

from klnb import paths
from klnb.runs import specs, sweep

SEEDS = [100]
GRIDS = {  # section: (names, betas, rates)
    "07_distillation": (None, [1.0], [2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3]),
    "08_math_reward": (["none", "reward-to-go"], [0.0, 0.05], [5e-4, 1e-3, 2e-3]),
    "smollm2": (["k2"], [1.0], [2e-5, 5e-5, 1e-4]),
}
FILE = paths.PUBLISHED / "lr_grid.csv"


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("sections", nargs="*", default=["07_distillation", "08_math_reward"], help=", ".join(GRIDS))
    ap.add_argument("--data-dir", help="the folder of MATH, for smollm2")
    args = ap.parse_args()
    params = YAML(typ="safe", pure=True).load(paths.PARAMS.read_text())
    rows = [r for r in csv.DictReader(FILE.open()) if r["section"] not in args.sections] if FILE.exists() else []
    for section in args.sections:
        names, betas, rates = GRIDS[section]
        train = params[section]["train"] | ({"data_dir": args.data_dir} if args.data_dir else {})
        train |= {"eval_every": train["steps"]}
        runs = {}
        for name in names or params[section]["names"]:
            for lr in rates:
                made = specs(train | {"lr": lr}, SEEDS, name, betas)
                runs |= {f"{name}-{lr:g}-{file}": s for file, s in made.items()}
        for run in sweep(runs, paths.BUILD / "lr_grid" / section, processes=2):
            done, end = run["settings"], {m: f"{v[0]:.5g}" for m, v in run["evals"][-1].items() if m != "step"}
            rows.append({"section": section, **{k: done[k] for k in ("name", "beta", "lr", "seed", "steps")}, **end})
    paths.PUBLISHED.mkdir(exist_ok=True)
    with open(FILE, "w", newline="") as file:
        out = csv.DictWriter(file, rows[-1], lineterminator="\n")
        out.writeheader()
        out.writerows(sorted(rows, key=lambda row: row["section"]))


if __name__ == "__main__":
    main()
