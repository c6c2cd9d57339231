// Agents print anything: characters that act on the order of others, or that nobody sees, are written out.
// The classes are those of libs/cli/view/safe_text.py; a test compares both on every character.

const UNSAFE = /[\p{Cc}\p{Cs}\p{Zl}\p{Zp}\u{e0000}-\u{e007f}\u061c\u200e\u200f\ufeff\u202a-\u202e\u2066-\u2069]/gu;

/** The text on one line. */
export function safeLine(text: string): string {
  return text.replace(UNSAFE, (character) => (character === "\t" ? character : written(character)));
}

/** The text with its lines; a carriage return before a line's end is none of its characters. */
export function safeText(text: string): string {
  return text.split("\n").map((line) => safeLine(line.replace(/\r$/, ""))).join("\n");
}

function written(character: string): string {
  if (character === "\n") return "\\n";
  if (character === "\r") return "\\r";
  const code = character.codePointAt(0) ?? 0;
  const [mark, digits] = code < 0x100 ? ["x", 2] : code < 0x10000 ? ["u", 4] : ["U", 8];
  return `\\${mark}${code.toString(16).padStart(Number(digits), "0")}`;
}
