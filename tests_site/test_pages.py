"""The built tutorial in headless Chromium, from disk, with the network cut: `make test-site`."""
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from playwright.sync_api import sync_playwright

import klnb
from klnb import exact, policies, stats
from klnb.paths import BUILD

HTML = BUILD / "site" / "html"
PAGES = sorted(str(p.relative_to(HTML)) for p in HTML.rglob("*.html") if "_static" not in p.parts)
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
PHONE = {"width": 390, "height": 844}
CHECKS = (Path(__file__).parent / "checks.js").read_text()


@pytest.fixture(scope="session")
def browser():
    assert CHROMIUM, "no Chromium here; on Debian: apt-get install chromium"
    assert len(PAGES) > 5, "the site is not built: make site"
    with sync_playwright() as p:
        chromium = p.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


def opened(browser, page, **options):
    """The page, from disk and offline, and what went wrong on it."""
    context = browser.new_context(offline=True, **options)
    tab, wrong = context.new_page(), []
    tab.on("console", lambda m: wrong.append(f"{m.type}: {m.text}") if m.type in ("error", "warning") else None)
    tab.on("pageerror", lambda e: wrong.append(f"exception: {e}"))
    tab.on("requestfailed", lambda r: wrong.append(f"failed: {r.url}"))
    tab.on("request", lambda r: None if r.url.startswith(("file:", "data:")) else wrong.append(f"not on disk: {r.url}"))
    tab.goto((HTML / page).as_uri())
    tab.evaluate(CHECKS)
    tab.evaluate("checks.ready()")
    return tab, wrong


def found(tab, *names):
    return {name: list_ for name in names if (list_ := tab.evaluate(f"checks.{name}()"))}


@pytest.mark.parametrize("page", PAGES)
def test_page_loads_offline_with_its_images_and_mathematics(browser, page):
    tab, wrong = opened(browser, page, viewport={"width": 1280, "height": 900})
    tab.evaluate("checks.loaded()")
    tab.wait_for_function("[...document.images].every((i) => i.complete)")
    assert found(tab, "broken", "nameless", "uncaptioned", "red", "unset", "raw", "faint") == {}
    assert wrong == []
    tab.context.close()


@pytest.mark.parametrize("page", PAGES)
def test_page_fits_a_phone_and_is_legible_in_the_dark(browser, page):
    tab, wrong = opened(browser, page, viewport={"width": 390, "height": 844}, color_scheme="dark")
    assert tab.evaluate("document.documentElement.dataset.theme") == "dark"
    assert tab.evaluate("checks.wide()") <= 0
    tab.evaluate("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
    assert found(tab, "cut", "faint") == {}
    assert set(tab.evaluate("checks.grounds()")) <= {"rgb(255, 255, 255)"}  # figures keep their white ground
    assert wrong == []
    tab.context.close()


def test_search_finds_a_word_offline(browser):
    tab, wrong = opened(browser, "search.html")
    tab.goto((HTML / "search.html").as_uri() + "?q=off-policy")
    tab.wait_for_selector("#search-results ul.search li a", timeout=20_000)
    assert wrong == []
    tab.context.close()


def test_previous_and_next_lead_through_all_pages():
    seen = [HTML / "index.html"]
    while link := re.search(r'<a class="right-next"\s+href="([^"#]+)"', seen[-1].read_text()):
        seen.append((seen[-1].parent / link[1]).resolve())
        assert len(seen) <= len(PAGES)
    extra = {"genindex.html", "search.html", "py-modindex.html"}
    assert sorted(str(p.relative_to(HTML)) for p in seen) == [p for p in PAGES if p not in extra]


# ---- the interactive page against the oracle


def position(logits):
    return policies.Tabular(torch.tensor([logits], dtype=torch.float64), horizon=1)


def oracle(state):
    """Gradients by enumeration of kl_loss itself, one per estimator, and the optima of klnb.exact."""
    policy, ref = position(state["policy"]), position(state["ref"])
    reward = torch.tensor(state["reward"], dtype=torch.float64)
    gradients = {}
    for name, e in klnb.ESTIMATORS.items():
        if e.needs_logits:

            def loss(logp, ref_logp, mask, behavior_logp, logits, ref_logits, name=name):
                return klnb.kl_loss(name, logp, ref_logp, mask, logits=logits, ref_logits=ref_logits)
        else:

            def loss(logp, ref_logp, mask, behavior_logp, name=name):
                return klnb.kl_loss(name, logp, ref_logp, mask)
        gradients[name] = exact.expected_gradient(loss, policy, ref)[0]
    ends = {which: exact.optimum(reward, ref, state["beta"], which=which) for which in ("target", "swapped")}
    return gradients, ends, exact.kl(policy, ref).item(), exact.kl(ref, policy).item()


def close(a, b):
    torch.testing.assert_close(torch.as_tensor(a, dtype=torch.float64), b, rtol=0, atol=1e-6)


def shown(tab):
    """What the page shows: the state of its sliders and, per estimator, its row of numbers (unrounded)."""
    now = json.loads(tab.get_attribute(".pg-now", "data-values"))
    rows = {}
    for row in tab.query_selector_all(".pg-table tbody tr"):
        data = {k: json.loads(row.get_attribute(f"data-{k}")) for k in ("gradient", "end", "kl", "reward")}
        data["field"] = row.get_attribute("data-field")
        data["cells"] = [cell.inner_text() for cell in row.query_selector_all("td")]
        rows |= {name: data for name in row.get_attribute("data-names").split(", ")}
    return now, rows


def test_interactive_page_agrees_with_the_oracle(browser):
    tab, wrong = opened(browser, "playground.html", viewport={"width": 1280, "height": 900})
    random = stats.generator(0, "sliders")
    for _ in range(8):
        want = {}
        for slider in tab.query_selector_all("#klnb-playground input[type=range]"):
            low, high, step = (float(slider.get_attribute(a)) for a in ("min", "max", "step"))
            value = low + step * int(torch.randint(round((high - low) / step) + 1, (1,), generator=random))
            slider.evaluate("(s, v) => { s.value = v; s.dispatchEvent(new Event('input', {bubbles: true})); }", value)
            want[slider.get_attribute("id")] = value
        now, rows = shown(tab)
        state = now["state"]
        for key in ("policy", "ref", "reward"):
            close(state[key], torch.tensor([want[f"s-{key}-{i}"] for i in range(3)], dtype=torch.float64))
        assert abs(state["beta"] - 10 ** want["s-beta"]) < 1e-9
        gradients, ends, kl, swapped = oracle(state)
        assert set(rows) == set(klnb.ESTIMATORS)
        for name, row in rows.items():
            close(row["gradient"], gradients[name])
            if row["field"] != "zero":
                close(row["end"], ends[row["field"]])
                assert abs(sum(row["end"]) - 1) < 1e-9
            read = [float(v) for v in row["cells"][0].strip("()").replace("−", "-").split(", ")]
            assert max(abs(a - b) for a, b in zip(read, row["gradient"])) <= 5.1e-4  # what a reader sees, rounded
        close([now["kl"], now["klSwapped"]], torch.tensor([kl, swapped], dtype=torch.float64))
        top = max(state["reward"])
        if state["reward"].count(top) == 1:  # k1 does not regularise: the best action, with certainty
            assert rows["k1"]["end"] == [float(r == top) for r in state["reward"]]
    assert wrong == []
    tab.context.close()


def test_interactive_gradients_are_those_of_the_fields(browser):
    """The pure function, at states beyond the sliders' range: a weak coefficient, far policies, equal rewards."""
    tab, _ = opened(browser, "playground.html")
    for state in (
        {"policy": [9.0, -3.0, 0.5], "ref": [-6.0, 2.0, 1.0], "reward": [0.3, 0.3, 0.0], "beta": 0.01},
        {"policy": [0.1, 0.0, -0.1], "ref": [0.0, 0.0, 0.0], "reward": [0.0, 0.0, 0.0], "beta": 100.0},
        {"policy": [1.0, 0.0, -1.0], "ref": [12.0, 0.0, -12.0], "reward": [0.0, 0.5, 1.0], "beta": 0.05},
    ):
        got = tab.evaluate("s => window.klnb.compute(s)", state)
        policy, ref = position(state["policy"]), position(state["ref"])
        reward = torch.tensor(state["reward"], dtype=torch.float64)
        close(got["gradient"]["target"], exact.gradient(policy, ref, "R_seq")[0])
        close(got["gradient"]["swapped"], exact.gradient(policy, ref, "F_seq")[0])
        for which in ("target", "swapped"):
            close(got["end"][which], exact.optimum(reward, ref, state["beta"], which=which))
        # each drawn way ends where its estimator settles
        for field in ("target", "swapped"):
            path = tab.evaluate("([s, f, e]) => window.klnb.flow(s, f, e)", [state, field, got["end"][field]])
            assert max(abs(a - b) for a, b in zip(path[-1], got["end"][field])) < 0.02
    tab.context.close()


def test_sliders_obey_the_keyboard_and_points_the_pointer(browser):
    tab, wrong = opened(browser, "playground.html", viewport={"width": 1280, "height": 900})
    before, _ = shown(tab)
    tab.focus("#s-policy-0")
    tab.keyboard.press("ArrowRight")
    after, _ = shown(tab)
    assert abs(after["state"]["policy"][0] - before["state"]["policy"][0] - 0.1) < 1e-9
    box = tab.query_selector("[data-drag=policy]").bounding_box()
    tab.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    tab.mouse.down()
    tab.mouse.move(box["x"] + 30, box["y"] + 80, steps=4)
    tab.mouse.up()
    moved, rows = shown(tab)
    assert moved["state"]["policy"] != after["state"]["policy"]
    close(rows["k3"]["gradient"], oracle(moved["state"])[0]["k3"])
    tab.click("text=a strong penalty")
    assert abs(shown(tab)[0]["state"]["beta"] - 4) < 0.2
    assert wrong == []
    tab.context.close()
