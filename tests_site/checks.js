// What tests_site/test_pages.py asks of a page, as functions that return the offenders.
window.checks = (() => {
  const texts = (list) => list.map((e) => `${e.tagName}: ${(e.src || e.textContent).trim().slice(-80)}`);
  const all = (selector) => [...document.querySelectorAll(selector)];
  const numbers = (color) => (color.match(/[\d.]+/g) || []).map(Number);

  // WCAG 2: contrast of a text with the nearest opaque ground behind it
  function luminance(color) {
    const [r, g, b] = color.slice(0, 3).map((v) => v / 255).map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  }
  function ground(e) {
    for (; e; e = e.parentElement) {
      const color = numbers(getComputedStyle(e).backgroundColor);
      if (color.length && (color[3] ?? 1) > 0.99) return color;
    }
    return [255, 255, 255];
  }
  function contrast(e) {
    const [a, b] = [luminance(numbers(getComputedStyle(e).color)), luminance(ground(e))].sort((x, y) => y - x);
    return (a + 0.05) / (b + 0.05);
  }

  const TEXT = "p, li, td, th, h1, h2, h3, code, pre, pre span, figcaption, summary, dt, a, label, legend, output, button";
  return {
    ready: () => (window.MathJax?.startup ? window.MathJax.startup.promise.then(() => true) : true),
    loaded: () => all("img").forEach((i) => { i.loading = "eager"; }),
    broken: () => texts(all("img").filter((i) => !i.naturalWidth)),
    nameless: () => texts(all(".bd-content img").filter((i) => i.alt.length < 20)),
    uncaptioned: () => texts(all(".bd-content img").filter((i) => !i.closest("figure")?.querySelector("figcaption"))),
    red: () => texts(all("mjx-merror, [data-mjx-error]")),
    unset: () => texts(all(".math").filter((e) => !e.querySelector("mjx-container"))),
    raw: () => {
      const body = document.querySelector(".bd-content").cloneNode(true);
      body.querySelectorAll("pre, code, script, mjx-container, dl.py").forEach((e) => e.remove());
      return body.textContent.match(/\$\$|\\\(|\\\[|\\[a-z]{3,}|<sub>|\$[^$\n]+\$/g) || [];
    },
    wide: () => document.documentElement.scrollWidth - innerWidth,
    // what reaches beyond the screen without lying in a box that scrolls
    cut: () => texts(all(".bd-content *").filter((e) => {
      const box = e.getBoundingClientRect();
      const hidden = e.closest("mjx-assistive-mml, .headerlink, svg, .sr-only, [aria-hidden]");
      if (!box.width || box.right <= innerWidth + 1 || hidden) return false;
      for (let p = e; p; p = p.parentElement) if (["auto", "scroll"].includes(getComputedStyle(p).overflowX)) return false;
      return true;
    })),
    faint: () => texts(all(`.bd-content :is(${TEXT})`).filter((e) => e.innerText?.trim() && e.getClientRects().length && contrast(e) < 4.5)),
    grounds: () => all(".bd-content img").map((i) => getComputedStyle(i).backgroundColor),
  };
})();
