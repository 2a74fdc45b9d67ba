// The payload in the page: JSON, compressed, in base64.

import { byId } from "./dom.js";

/** The payload in this page, or null if it must be fetched. */
export async function unpackPayload() {
  const text = byId("payload").textContent.trim();
  if (!text) return null;
  const bytes = Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).json();
}
