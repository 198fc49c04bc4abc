// Small charts: a sparkline on canvas, a histogram as bars of divs.

/** Seconds for people: 12 ms, 1.4 s. */
export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 0.0995) return `${(value * 1000).toFixed(value < 0.00995 ? 1 : 0)} ms`;
  return value < 0.9995 ? `${Math.round(value * 1000)} ms` : `${value.toFixed(value < 10 ? 1 : 0)} s`;
}

export class Sparkline {
  constructor(canvas, length = 120) {
    this.canvas = canvas;
    this.length = length;
    this.values = [];
  }

  push(value) {
    this.values.push(value);
    if (this.values.length > this.length) this.values.shift();
    const ratio = devicePixelRatio || 1;
    const width = this.canvas.clientWidth;
    const height = this.canvas.clientHeight;
    this.canvas.width = width * ratio;
    this.canvas.height = height * ratio;
    const context = this.canvas.getContext("2d");
    context.scale(ratio, ratio);
    const top = Math.max(1, ...this.values);
    const step = width / (this.length - 1);
    const offset = width - (this.values.length - 1) * step;
    context.beginPath();
    context.moveTo(offset, height);
    this.values.forEach((v, i) => context.lineTo(offset + i * step, height - (v / top) * (height - 3)));
    context.lineTo(width, height);
    context.fillStyle = getComputedStyle(document.documentElement).getPropertyValue("--accent").trim();
    context.globalAlpha = 0.22;
    context.fill();
  }
}

/** Bars of `data.counts` under `data.bounds` (seconds). Made once, then only their heights change. */
export function histogram(root, label, data) {
  const { bounds, counts, p50, p95 } = data;
  if (root.childElementCount !== counts.length) {
    root.replaceChildren(
      ...counts.map((_, i) => {
        const bar = document.createElement("div");
        const text = document.createElement("span");
        // Every other bound is written: all of them would run together on a phone.
        text.textContent = i === bounds.length ? "∞" : i % 2 ? "\u00a0" : seconds(bounds[i]).replace(" ", "").replace(".0", "");
        bar.append(text);
        return bar;
      }),
    );
  }
  const top = Math.max(1, ...counts);
  [...root.children].forEach((bar, i) => {
    bar.style.setProperty("--share", counts[i] / top);
    bar.title = `${counts[i]} ${i < bounds.length ? `at most ${seconds(bounds[i])}` : "slower"}`;
  });
  label.textContent = p50 === null ? "no request yet" : `p50 ${seconds(p50)} · p95 ${seconds(p95)}`;
}
