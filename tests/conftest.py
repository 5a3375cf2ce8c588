import matplotlib

import klnb.nbrun  # noqa: F401  before jupytext and papermill: it keeps them from loading a slow optional package

matplotlib.use("Agg")
