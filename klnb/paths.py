"""Where things lie, from any working folder (JupyterLab starts a kernel in notebooks/)."""
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FIGURES = ROOT / "figures"  # PNG and caption JSON, in git
RESULTS = ROOT / "results"  # data that the stages make
BUILD = ROOT / "build"  # executed notebooks, the tutorial
PUBLISHED = ROOT / "published"  # small tables of expensive scales, in git
PARAMS = ROOT / "params.yaml"
