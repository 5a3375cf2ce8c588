"""Where things lie, from any working folder (JupyterLab starts a kernel in notebooks/)."""
import os
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FIGURES = ROOT / "figures"  # PNG and caption JSON, in git
RESULTS = ROOT / "results"  # data that the stages make
BUILD = ROOT / "build"  # executed notebooks, the tutorial
PUBLISHED = ROOT / "published"  # small tables of expensive scales, in git
PARAMS = ROOT / "params.yaml"


def write(file, save):
    """save(temporary path), then the file is there whole."""
    tmp = file.with_name(f".{file.name}.{os.getpid()}")
    save(tmp)
    os.replace(tmp, file)
