// The KV pool as a map: a square a block, coloured by its state, with a glow where it has just changed.

const NAMES = ["free", "cached", "used", "shared"];
const TOKENS = ["--block-free", "--block-cached", "--block-used", "--block-shared"];
const FADE_MS = 900;
const MAX_HEIGHT = 190; // CSS pixels

export class BlockMap {
  constructor(canvas, legend, tip) {
    this.canvas = canvas;
    this.context = canvas.getContext("2d");
    this.counts = [...legend.querySelectorAll("b")];
    this.tip = tip;
    this.tipText = tip.textContent;
    this.states = new Uint8Array(0);
    this.changed = new Float64Array(0); // when each block last changed
    this.encoded = null;
    this.drawing = false;
    new ResizeObserver(() => this.draw()).observe(canvas);
    canvas.addEventListener("pointermove", (event) => this.hover(event));
    canvas.addEventListener("pointerleave", () => (this.tip.textContent = this.tipText));
  }

  /** `encoded`: base64, a byte a block. */
  update(encoded, blockSize) {
    this.blockSize = blockSize;
    if (encoded === this.encoded) return;
    this.encoded = encoded;
    const next = Uint8Array.from(atob(encoded), (char) => char.charCodeAt(0));
    const now = performance.now();
    if (next.length !== this.states.length) this.changed = new Float64Array(next.length).fill(-FADE_MS);
    else for (let i = 0; i < next.length; i++) if (next[i] !== this.states[i]) this.changed[i] = now;
    this.states = next;
    const counts = [0, 0, 0, 0];
    for (const state of next) counts[state]++;
    this.counts.forEach((node, i) => (node.textContent = counts[i].toLocaleString()));
    const said = counts.map((count, i) => `${count} ${NAMES[i]}`).join(", ");
    this.canvas.setAttribute("aria-label", `Map of ${next.length} KV blocks: ${said}`);
    this.canvas.dataset.used = counts[2] + counts[3];
    this.draw();
  }

  /** Squares as large as fit, at most 18 px. Where even 3 px do not fit, a square stands for several blocks. */
  layout() {
    const width = this.canvas.clientWidth;
    let height = MAX_HEIGHT;
    let cell = Math.min(18, Math.floor(Math.sqrt((width * height) / Math.max(1, this.states.length))));
    cell = Math.max(cell, 3);
    while (cell > 3 && Math.ceil(this.states.length / Math.floor(width / cell)) * cell > height) cell--;
    const columns = Math.max(1, Math.floor(width / cell));
    const rows = Math.max(1, Math.floor(height / cell));
    const perCell = Math.max(1, Math.ceil(this.states.length / (columns * rows)));
    height = Math.max(cell, Math.ceil(this.states.length / perCell / columns) * cell);
    return { width, height, cell, columns, perCell };
  }

  draw() {
    const { width, height, cell, columns, perCell } = this.layout();
    const ratio = devicePixelRatio || 1;
    this.canvas.style.height = `${height}px`;
    if (this.canvas.width !== width * ratio || this.canvas.height !== height * ratio) {
      this.canvas.width = width * ratio;
      this.canvas.height = height * ratio;
    }
    const style = getComputedStyle(document.documentElement);
    const colours = TOKENS.map((token) => style.getPropertyValue(token).trim());
    const glow = style.getPropertyValue("--text").trim();
    const context = this.context;
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, width, height);
    const gap = cell > 6 ? 2 : 1;
    const radius = cell > 8 ? 2.5 : 0;
    const now = performance.now();
    let fading = false;
    for (let first = 0, at = 0; first < this.states.length; first += perCell, at++) {
      let state = 0;
      let changed = -Infinity;
      for (let i = first; i < Math.min(first + perCell, this.states.length); i++) {
        state = Math.max(state, this.states[i]);
        changed = Math.max(changed, this.changed[i]);
      }
      const x = (at % columns) * cell;
      const y = Math.floor(at / columns) * cell;
      context.beginPath();
      context.roundRect(x, y, cell - gap, cell - gap, radius);
      context.fillStyle = colours[state];
      context.fill();
      const age = (now - changed) / FADE_MS;
      if (age < 1) {
        fading = true;
        context.globalAlpha = 0.45 * (1 - age);
        context.fillStyle = glow;
        context.fill();
        context.globalAlpha = 1;
      }
    }
    if (fading && !this.drawing && !matchMedia("(prefers-reduced-motion: reduce)").matches) {
      this.drawing = true;
      requestAnimationFrame(() => {
        this.drawing = false;
        this.draw();
      });
    }
  }

  hover(event) {
    const { cell, columns, perCell } = this.layout();
    const column = Math.floor(event.offsetX / cell);
    const block = (Math.floor(event.offsetY / cell) * columns + column) * perCell;
    if (column >= columns || block >= this.states.length) return;
    const which = perCell === 1 ? `Block ${block}` : `Blocks ${block} to ${block + perCell - 1}`;
    this.tip.textContent = `${which}: ${NAMES[this.states[block]]}, ${this.blockSize} tokens each`;
  }
}
