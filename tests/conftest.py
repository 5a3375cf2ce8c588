import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch: tensors are small here, and threads only get in each other's way

import matplotlib  # noqa: E402

import klnb.nbrun  # noqa: E402, F401  before jupytext and papermill: it keeps them from loading a slow optional package

matplotlib.use("Agg")
