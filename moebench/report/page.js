// Draws each figure when it comes into view, in the page's own colours, and again when screen or colours change.
(() => {
  const config = { responsive: false, displaylogo: false, displayModeBar: false, showTips: false };
  const narrow = () => window.matchMedia("(max-width: 40rem)").matches;
  const fill = (value, style) => {
    if (typeof value === "string") return value.startsWith("var(--") ? style.getPropertyValue(value.slice(4, -1)).trim() : value;
    if (Array.isArray(value)) return value.map((part) => fill(part, style));
    if (value && typeof value === "object") return Object.fromEntries(Object.entries(value).map(([key, part]) => [key, fill(part, style)]));
    return value;
  };
  const draw = (plot) => {
    const width = plot.clientWidth;
    if (!width) return;
    const figure = JSON.parse(document.getElementById(plot.dataset.figure).textContent);
    const { data, layout } = fill(figure, getComputedStyle(document.documentElement));
    const lines = figure.legend ? Math.ceil(figure.legend / Math.max(1, Math.floor(width / 190))) : 0;
    const legend = lines ? 22 * lines + 14 : 0;
    layout.width = width;
    layout.height = figure.height + legend;
    layout.margin.b += legend;
    plot.style.height = `${layout.height}px`;
    if (narrow()) {
      layout.font.size = 12;
      layout.margin.l = 40;
      layout.margin.r = 12;
    }
    Plotly.react(plot, data, layout, config).then(() => {
      const box = plot.querySelector(".legend");
      const spare = box ? legend - 12 - Math.ceil(box.getBBox().height) : 0;
      if (spare) {
        plot.style.height = `${layout.height - spare}px`;
        return Plotly.relayout(plot, { height: layout.height - spare, "margin.b": layout.margin.b - spare });
      }
    }).then(() => {
      plot.querySelectorAll("svg").forEach((svg) => svg.setAttribute("aria-hidden", "true"));
      plot.dataset.drawn = width;
    });
  };
  const plots = [...document.querySelectorAll(".plot")];
  const seen = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      if (entry.isIntersecting && !entry.target.dataset.drawn) draw(entry.target);
    }
  }, { rootMargin: "400px" });
  plots.forEach((plot) => seen.observe(plot));
  const again = () => plots.filter((plot) => plot.dataset.drawn).forEach(draw);
  let waiting;
  window.addEventListener("resize", () => {
    clearTimeout(waiting);
    waiting = setTimeout(() => plots.filter((plot) => plot.dataset.drawn && plot.clientWidth !== +plot.dataset.drawn).forEach(draw), 150);
  });
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", again);
  document.querySelectorAll("details").forEach((box) => box.addEventListener("toggle", () => box.querySelectorAll(".plot:not([data-drawn])").forEach(draw)));
  window.addEventListener("beforeprint", () => {
    document.querySelectorAll("details").forEach((box) => { box.open = true; });
    plots.filter((plot) => !plot.dataset.drawn).forEach(draw);
  });
})();
