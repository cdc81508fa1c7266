// Draws the figures that stand in the page as JSON, each when it comes near the window.
"use strict";
(() => {
  const specs = JSON.parse(document.getElementById("figures").textContent);
  const root = document.documentElement;
  const drawn = new Set();
  const PAPER_WIDTH_PX = 680, PAPER_HEIGHT_PX = 780;
  const { narrow } = kvsimFigures;

  const draw = (place, size) => {
    kvsimFigures.draw(place, specs[place.id.slice("plot-".length)], size);
    if (drawn.size === 0) performance.mark("first-figure");
    drawn.add(place);
    root.dataset.drawn = String(drawn.size);
  };

  // Running plotly.js takes longer than showing the page, so that comes first.
  const load = () => {
    if (window.Plotly) return;
    const script = document.createElement("script");
    script.textContent = document.getElementById("drawing").textContent;
    document.body.append(script);
  };
  const places = [...document.querySelectorAll(".plot")];
  root.dataset.figures = String(places.length);
  const watch = new IntersectionObserver(
    (entries) => {
      for (const { target, isIntersecting } of entries) {
        if (!isIntersecting) continue;
        watch.unobserve(target);
        if (!drawn.has(target)) draw(target);
      }
    },
    { rootMargin: "400px" },
  );
  const begin = () => {
    load();
    for (const place of places) watch.observe(place);
  };
  if (document.hidden) setTimeout(begin);
  else requestAnimationFrame(() => setTimeout(begin));
  addEventListener("themechange", () => {
    for (const place of drawn) draw(place);
  });
  narrow.addEventListener("change", () => {
    for (const place of drawn) draw(place);
  });
  // Paper is light, and narrower than a window.
  let theme;
  addEventListener("beforeprint", () => {
    load();
    theme = root.dataset.theme;
    root.dataset.theme = "light";
    for (const place of places) {
      const height = Math.min(specs[place.id.slice("plot-".length)].layout.meta.heightPx, PAPER_HEIGHT_PX);
      draw(place, { autosize: false, width: PAPER_WIDTH_PX, height });
    }
  });
  addEventListener("afterprint", () => {
    if (theme === undefined) delete root.dataset.theme;
    else root.dataset.theme = theme;
    for (const place of places) draw(place);
  });
})();
