// A canvas at the resolution of the screen, with its scale and fonts.

export class Pen {
  constructor(canvas) {
    this.canvas = canvas;
    this.context = canvas.getContext("2d");
    this.width = 0;
    this.height = 0;
    this.ratio = 1;
    this.widths = new Map();
  }

  /** Give the canvas a size in CSS pixels; wipe it. */
  begin(width, height) {
    const ratio = window.devicePixelRatio || 1;
    if (width !== this.width || height !== this.height || ratio !== this.ratio) {
      this.canvas.width = Math.round(width * ratio);
      this.canvas.height = Math.round(height * ratio);
      this.canvas.style.height = `${height}px`;
      Object.assign(this, { width, height, ratio });
    }
    this.context.setTransform(ratio, 0, 0, ratio, 0, 0);
    this.context.clearRect(0, 0, width, height);
  }

  /** Set the span of time to draw; `x(time)` is then a position on the canvas. */
  look({ from, to }) {
    this.from = from;
    this.to = to;
    this.scale = this.width / (to - from);
  }

  x(time) {
    return (time - this.from) * this.scale;
  }

  font(size, weight = 400) {
    const font = `${weight} ${size}px ${FONT}`;
    if (this.context.font !== font) this.context.font = font;
    this.fontKey = font;
  }

  /** The width of a text in the font, cached. */
  widthOf(text) {
    const key = `${this.fontKey}|${text}`;
    let width = this.widths.get(key);
    if (width === undefined) {
      if (this.widths.size > 5000) this.widths.clear();
      width = this.context.measureText(text).width;
      this.widths.set(key, width);
    }
    return width;
  }

  /** The text, cut off if it is too long; empty if too little would be left. */
  fitted(text, room) {
    if (this.widthOf(text) <= room) return text;
    let length = Math.floor((text.length * room) / this.widthOf(text)) - 1;
    while (length > 1 && this.widthOf(`${text.slice(0, length)}\u2026`) > room) length -= 1;
    return length < 2 ? "" : `${text.slice(0, length)}\u2026`;
  }

  write(text, x, y, room) {
    const fits = this.fitted(text, room);
    if (fits) this.context.fillText(fits, x, y);
  }
}

const FONT = '-apple-system, "Segoe UI", Inter, Roboto, "Helvetica Neue", Arial, sans-serif';
