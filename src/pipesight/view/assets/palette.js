// Colours: those of the style sheet, and a ramp over micro-batches that differs in lightness, too, not only in hue.

import { byId } from "./dom.js";
import { listen, state } from "./state.js";

const STOPS = 64; // of the ramp
const NAMES = [
  "paper",
  "ink",
  "soft",
  "faint",
  "line",
  "accent",
  "alarm",
  "hatch",
  "data",
  "optimizer",
  "checkpoint",
  "communication",
  "own",
  "forward",
  "loss",
  "recompute",
  "backward",
  "evaluation",
  "weights",
  "gradients",
  "optimizer_state",
  "inputs",
  "activations",
];

export const palette = { dark: false, colours: {}, blocks: [] };

/** How a block of a micro-batch and a phase is filled, and the colour of letters on it. */
export function blockColours(microbatch, phase) {
  const chunks = Math.max(state.run?.chunks ?? 1, 2);
  const stop = Math.round((Math.min(microbatch, chunks - 1) / (chunks - 1)) * (STOPS - 1));
  return palette.blocks[phase][stop];
}

/** Read the colours again, since the theme may have changed. */
function readPalette() {
  const probe = byId("main");
  const style = getComputedStyle(probe);
  for (const name of NAMES) {
    probe.style.color = `var(--${name})`;
    palette.colours[name] = style.color;
  }
  probe.style.color = "";
  palette.dark = luminance(channels(palette.colours.paper)) < 0.5;
  const paper = channels(palette.colours.paper);
  // Forward and recompute are lighter than backward, or darker in the dark theme; heights and lines tell them apart too.
  palette.blocks = (palette.dark ? [0.5, 0.34, 1, 0.7] : [0.42, 0.3, 1, 0.62]).map((strength) =>
    Array.from({ length: STOPS }, (_, stop) => {
      const full = ramp(stop / (STOPS - 1));
      const fill = full.map((channel, index) => Math.round(channel * strength + paper[index] * (1 - strength)));
      return {
        fill: text(fill),
        edge: text(full),
        ink: luminance(fill) > 0.19 ? "#111820" : "#ffffff",
        bits: bits(fill),
      };
    }),
  );
}

listen("theme", readPalette);

/** From indigo over teal to a dark yellow: the lightness rises all the way. */
function ramp(t) {
  const lightness = (palette.dark ? 0.55 : 0.43) + (palette.dark ? 0.25 : 0.35) * t;
  const chroma = 0.115 + 0.02 * Math.sin(Math.PI * t);
  const hue = ((278 - 190 * t) * Math.PI) / 180;
  return fromOklab(lightness, chroma * Math.cos(hue), chroma * Math.sin(hue));
}

/** Sequential: light for small values, or dark in the dark theme. */
export function heatColour(t) {
  const rising = palette.dark ? t : 1 - t;
  const lightness = palette.dark ? 0.26 + 0.6 * rising : 0.36 + 0.6 * rising;
  const hue = ((palette.dark ? 265 - 165 * t : 230 + 50 * t) * Math.PI) / 180;
  const chroma = 0.03 + 0.1 * t;
  return text(fromOklab(lightness, chroma * Math.cos(hue), chroma * Math.sin(hue)));
}

/** Diverging, for `t` from -1 to 1: orange, background, blue. */
export function divergingColour(t) {
  const strength = Math.min(Math.abs(t), 1);
  const lightness = palette.dark ? 0.27 + 0.45 * strength : 0.97 - 0.45 * strength;
  const hue = ((t < 0 ? 55 : 255) * Math.PI) / 180;
  return text(fromOklab(lightness, 0.13 * strength * Math.cos(hue), 0.13 * strength * Math.sin(hue)));
}

function fromOklab(lightness, a, b) {
  const l = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3;
  const m = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3;
  const s = (lightness - 0.0894841775 * a - 1.291485548 * b) ** 3;
  return [
    4.0767416621 * l - 3.3077115913 * m + 0.2309699292 * s,
    -1.2684380046 * l + 2.6097574011 * m - 0.3413193965 * s,
    -0.0041960863 * l - 0.7034186147 * m + 1.707614701 * s,
  ].map((linear) => {
    const clipped = Math.min(Math.max(linear, 0), 1);
    return Math.round(255 * (clipped <= 0.0031308 ? 12.92 * clipped : 1.055 * clipped ** (1 / 2.4) - 0.055));
  });
}

const text = ([red, green, blue]) => `rgb(${red}, ${green}, ${blue})`;
const bits = ([red, green, blue]) => (0xff000000 | (blue << 16) | (green << 8) | red) >>> 0;
const channels = (colour) => (colour.match(/[\d.]+/g) ?? ["0", "0", "0"]).slice(0, 3).map(Number);

function luminance(rgb) {
  const [red, green, blue] = rgb.map((channel) => (channel / 255) ** 2.2);
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
}
