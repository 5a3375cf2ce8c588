// Formulas in the text that are wider than a phone scroll on their own instead of being cut.
window.addEventListener("load", () => {
  const mark = () => {
    for (const m of document.querySelectorAll(".bd-content mjx-container:not([display])")) {
      m.classList.remove("wide");
      const block = m.closest("p, li, td, dd, h1, h2, h3, figcaption, div");
      if (block && m.getBoundingClientRect().width > block.clientWidth) m.classList.add("wide");
    }
  };
  if (window.MathJax && window.MathJax.startup) window.MathJax.startup.promise.then(mark);
  window.addEventListener("resize", mark);
});
