// What is sent of the text around the cursor, and of the places that were visited before.
"use strict";

const BLOCK_LINES = 256; // the text above is cut at a multiple, so that it begins alike while somebody types
const PIECE_LINES = 48;
const [MAX_ABOVE, MAX_BELOW, MAX_PIECE] = [32768, 8192, 4096]; // characters
let pieces = []; // of the places that were left, oldest first

// Return lines from `first` up to but not including `end`, each ended by "\n" but for the document's last.
function join(document, first, end) {
  let text = "";
  for (let line = Math.max(first, 0); line < Math.min(end, document.lineCount); line++) {
    text += document.lineAt(line).text + (line < document.lineCount - 1 ? "\n" : "");
  }
  return text;
}

const whole = (text) => Buffer.from(text).toString(); // half a character is no JSON
const above = (document, line) =>
  whole(join(document, Math.floor(line / BLOCK_LINES - 1) * BLOCK_LINES, line).slice(-MAX_ABOVE));
const below = (document, line) => whole(join(document, line + 1, line + 65).slice(0, MAX_BELOW));

// Return the fields of a request for a completion at a position.
function fields(document, { line, character }) {
  const here = join(document, line, line + 1);
  return {
    input_prefix: above(document, line),
    prompt: whole(here.slice(0, character).slice(-MAX_ABOVE)),
    input_suffix: whole(here.slice(character).slice(0, MAX_BELOW)) + below(document, line),
    input_extra: pieces.map(({ filename, text }) => ({ filename, text })),
  };
}

// Note a place that the cursor leaves, instead of older ones near it.
function leave({ document, line }) {
  const first = Math.max(0, line - PIECE_LINES / 2);
  const text = whole(join(document, first, first + PIECE_LINES).slice(0, MAX_PIECE));
  const isFar = (other) => other.document !== document || Math.abs(other.first - first) >= PIECE_LINES;
  pieces = [...pieces.filter(isFar), { document, first, filename: document.uri.path.split("/").pop(), text }].slice(-12);
}

module.exports = { above, below, fields, join, leave };
