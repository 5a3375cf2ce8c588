"""Figures: the same bytes every time, complete captions, colours that stay apart."""
import itertools
import json

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pytest

from klnb import figures
from klnb.losses import ESTIMATORS

CAPTION = {f: f"some {f}" for f in figures.CAPTION_FIELDS} | {"n": 20}


@pytest.fixture(autouse=True)
def fresh():
    figures.style()
    yield
    plt.close("all")
    mpl.rcdefaults()
    mpl.use("Agg")


def draw(runs=5):
    x = np.arange(10.0)
    fig, ax = plt.subplots()
    for i, name in enumerate(ESTIMATORS):
        data = np.random.default_rng(i).normal(i, 1, size=(runs, 10))
        figures.curve(ax, x, data, name)
    figures.label_ends(ax)
    ax.set(xlabel=r"step $\theta$", ylabel=r"$\mathrm{KL}(\pi\,\|\,\pi_{\mathrm{ref}})$")
    return fig, ax


def test_same_bytes_whatever_the_users_settings(tmp_path):
    for folder in ("a", "b"):
        figures.style()
        figures.save(draw()[0], "f", CAPTION, tmp_path / folder)
        mpl.rcParams.update({"font.size": 20, "axes.facecolor": "black", "savefig.dpi": 50})  # a user's matplotlibrc
    for file in ("f.png", "f.json"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
    assert sorted(p.name for p in (tmp_path / "b").iterdir()) == ["f.json", "f.png"]  # nothing left over
    assert json.loads((tmp_path / "b/f.json").read_text()) == CAPTION


def test_png_is_sharp_opaque_and_padded(tmp_path):
    figures.save(draw()[0], "f", CAPTION, tmp_path)
    image = plt.imread(tmp_path / "f.png")
    assert image.shape[1] == 1400  # twice the 700 pixels that a page shows
    border = np.concatenate([image[:8].reshape(-1, 4), image[-8:].reshape(-1, 4), image[:, :8].reshape(-1, 4)])
    assert (border == 1).all()  # white and opaque, so legible on a dark page; nothing touches the edge


@pytest.mark.parametrize("field", figures.CAPTION_FIELDS)
def test_a_missing_caption_field_is_refused(field, tmp_path):
    fig, _ = draw()
    for broken in ({f: v for f, v in CAPTION.items() if f != field}, CAPTION | {field: " "}, CAPTION | {field: ["x"]}):
        with pytest.raises(ValueError, match=rf"caption of f: .*{field}"):
            figures.save(fig, "f", broken, tmp_path)
    assert not list(tmp_path.iterdir())


def test_unknown_fields_and_wide_figures_are_refused(tmp_path):
    with pytest.raises(ValueError, match="unknown .'colour'"):
        figures.save(draw()[0], "f", CAPTION | {"colour": "red"}, tmp_path)
    fig, _ = plt.subplots(figsize=(12, 3))
    with pytest.raises(ValueError, match="too small to read"):
        figures.save(fig, "f", CAPTION, tmp_path)


@pytest.mark.parametrize("runs, lines", [(5, 6), (20, 1)])
def test_each_run_is_a_thin_line_below_20(runs, lines):
    fig, ax = plt.subplots()
    x, data = np.arange(3.0), np.random.default_rng(0).normal(size=(runs, 3))
    line = figures.curve(ax, x, data, "k3", label="mine")
    assert len(ax.get_lines()) == lines
    np.testing.assert_array_equal(line.get_ydata(), data.mean(0))
    assert line.get_label() == "mine" and line.get_color() == figures.COLORS["k3"]
    band = ax.collections[0].get_paths()[0].get_extents()
    assert band.y0 < data.mean(0).min() and band.y1 > data.mean(0).max()


def test_end_labels_don_t_overlap():
    fig, ax = plt.subplots()
    for i in range(5):
        ax.plot([0, 1], [0, 1 + i / 1000], label=str(i))
    figures.label_ends(ax, gap=0.06)
    y = [t.get_position()[1] for t in ax.texts]
    assert [t.get_text() for t in ax.texts] == list("01234")
    assert np.diff(y).min() >= 0.06 - 1e-12


# Machado, Oliveira & Fernandes (2009), severity 1, for linear RGB
DEFICIENCY = {
    "none": np.eye(3),
    "protan": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deutan": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritan": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}


def lab(color, deficiency):
    rgb = np.array(mpl.colors.to_rgb(color))
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    linear = np.clip(np.array(DEFICIENCY[deficiency]) @ linear, 0, 1)
    to_xyz = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    xyz = np.array(to_xyz) @ linear / [0.9505, 1, 1.089]
    f = np.where(xyz > (6 / 29) ** 3, np.cbrt(xyz), xyz / (3 * (6 / 29) ** 2) + 4 / 29)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("deficiency", DEFICIENCY)
def test_colours_of_estimators_stay_apart(deficiency):
    # CIELAB distance; 2.3 is just noticeable, so 15 is plain. Lighter than L = 75 a thin line fades into white paper.
    names = list(ESTIMATORS)
    distance = {
        (a, b): np.linalg.norm(lab(figures.COLORS[a], deficiency) - lab(figures.COLORS[b], deficiency))
        for a, b in itertools.combinations(names, 2)
    }
    assert min(distance.values()) > 15, min(distance, key=distance.get)
    assert max(lab(figures.COLORS[n], deficiency)[0] for n in names) < 80


def test_every_estimator_field_and_policy_has_a_look():
    assert set(figures.COLORS) == set(figures.LABELS) == {
        *ESTIMATORS, "R_seq", "F_seq", "R_tok", "F_tok", "policy", "ref", "behavior"
    }  # fmt: skip
    for name in figures.COLORS:
        plt.plot([0, 1], **figures.look(name))
