// Hatching, so that nothing is shown by colour alone.

const tiles = new Map();

/** A pattern of slanted lines in a colour, `gap` pixels apart; a negative `gap` leans left. */
export function hatching(pen, colour, gap, weight = 1) {
  const ratio = pen.ratio;
  const key = `${colour} ${gap} ${weight} ${ratio}`;
  if (!tiles.has(key)) {
    const size = Math.max(Math.round(Math.abs(gap) * ratio), 2);
    const tile = new OffscreenCanvas(size, size);
    const context = tile.getContext("2d");
    context.strokeStyle = colour;
    context.lineWidth = weight * ratio;
    context.beginPath();
    for (const shift of [-size, 0, size]) {
      context.moveTo(shift - 1, gap > 0 ? size + 1 : -1);
      context.lineTo(shift + size + 1, gap > 0 ? -1 : size + 1);
    }
    context.stroke();
    const pattern = pen.context.createPattern(tile, "repeat");
    pattern.setTransform(new DOMMatrix().scale(1 / ratio));
    tiles.set(key, pattern);
  }
  return tiles.get(key);
}
