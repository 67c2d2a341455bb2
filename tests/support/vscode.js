// A small stand-in for VS Code: its interface for extensions, a document, keys, and a screen that is JSON.
//
// node vscode.js FOLDER TEXT-FILE runs the extension in FOLDER. Each line of standard input is one command, an
// array of a word and its arguments, and is answered by one line with the state. The editor does with keys what
// VS Code does: a key changes the document, cancels what was asked before, and asks for suggestions.
"use strict";
const fs = require("fs");
const Module = require("module");
const readline = require("readline");

class Position {
  constructor(line, character) {
    Object.assign(this, { line, character });
  }
  compareTo(other) {
    return this.line - other.line || this.character - other.character;
  }
  isBefore(other) {
    return this.compareTo(other) < 0;
  }
}

class Range {
  constructor(...numbers) {
    [this.start, this.end] = numbers.length === 4 ? [new Position(...numbers.slice(0, 2)), new Position(...numbers.slice(2))] : numbers;
    [this.anchor, this.active] = [this.start, this.end];
  }
  contains(position) {
    return !position.isBefore(this.start) && !this.end.isBefore(position);
  }
}

class Document {
  constructor(path, text) {
    Object.assign(this, { languageId: "python", version: 1, text });
    this.uri = { scheme: "file", path, toString: () => `file://${path}`, toJSON: () => path };
  }
  get eol() {
    return this.text.includes("\r\n") ? "\r\n" : "\n";
  }
  get rows() {
    return this.text.split(/\r?\n/);
  }
  get lineCount() {
    return this.rows.length;
  }
  lineAt(line) {
    const text = this.rows[line];
    return { text, range: new Range(line, 0, line, text.length) };
  }
  validatePosition({ line, character }) {
    const row = Math.min(line, this.lineCount - 1);
    return new Position(row, row < line ? Infinity : Math.min(character, this.rows[row].length));
  }
  offsetAt({ line, character }) {
    const rows = this.rows.slice(0, line);
    if (line >= this.lineCount) return this.text.length;
    return rows.join("").length + rows.length * this.eol.length + Math.min(character, this.rows[line].length);
  }
  positionAt(offset) {
    const rows = this.text.slice(0, offset).split(/\r?\n/);
    return new Position(rows.length - 1, rows.at(-1).length);
  }
  getText(range) {
    return range ? this.text.slice(this.offsetAt(range.start), this.offsetAt(range.end)) : this.text;
  }
}

const folder = process.argv[2];
const listeners = {};
const on = (name) => (listener) => (listeners[name] = listener);
const fire = (name, event) => listeners[name]?.(event);
const contexts = {};
const registered = {};
const messages = [];
const overrides = JSON.parse(process.env.VSCODE_SETTINGS ?? "{}");
const manifest = JSON.parse(fs.readFileSync(`${folder}/package.json`, "utf8"));
const item = { show() {} };
const document = new Document(process.argv[3], fs.readFileSync(process.argv[3], "utf8"));
const drawn = new Map();
let [provider, source, ghost] = [null, null, []];

const editor = {
  document,
  options: { tabSize: 4 },
  visibleRanges: [new Range(0, 0, 1e6, 0)],
  selection: new Range(0, 0, 0, 0),
  setDecorations: (type, ranges) => drawn.set(type, ranges),
  revealRange: () => messages.push("revealed"),
  async edit(build) {
    build({ replace });
    return true;
  },
};

function replace(range, text) {
  const [from, to] = [document.offsetAt(range.start), document.offsetAt(range.end)];
  text = text.replace(/\r?\n/g, document.eol);
  document.text = document.text.slice(0, from) + text + document.text.slice(to);
  document.version++;
  fire("text", { document, contentChanges: [{ range, text }] });
}

function moveTo(offset, kind) {
  const at = document.positionAt(offset);
  editor.selection = new Range(at, at);
  fire("selection", { textEditor: editor, kind });
}

async function suggest(triggerKind) {
  source?.cancel();
  const asked = (source = { listeners: [], token: { isCancellationRequested: false } });
  asked.cancel = () => {
    if (asked.token.isCancellationRequested || asked.isOver) return;
    asked.token.isCancellationRequested = true;
    asked.listeners.forEach((listener) => listener());
  };
  asked.token.onCancellationRequested = (listener) => asked.listeners.push(listener);
  const items = await provider.provideInlineCompletionItems(document, editor.selection.active, { triggerKind }, asked.token);
  asked.isOver = true;
  if (source === asked) ghost = items.map((each) => each.insertText);
}

function insert(text) {
  const { active } = editor.selection;
  const offset = document.offsetAt(active);
  ghost = [];
  replace(new Range(active, active), text);
  moveTo(offset + text.replace(/\r?\n/g, document.eol).length);
  suggest(1);
}

const keys = {
  tab: () => (ghost.length ? insert(ghost[0]) : contexts["localspec.proposed"] ? registered["localspec.acceptEdit"]() : insert("    ")),
  escape() {
    if (contexts["localspec.proposed"]) registered["localspec.rejectEdit"]();
    if (contexts["localspec.busy"] && ghost.length) registered["localspec.cancel"]();
    ghost = [];
  },
  async another() {
    const count = ghost.length;
    await suggest(0);
    if (count) ghost.push(ghost.shift());
  },
  backspace() {
    const { active } = editor.selection;
    const offset = document.offsetAt(active);
    ghost = [];
    replace(new Range(document.positionAt(offset - 1), active), "");
    moveTo(offset - 1);
    suggest(1);
  },
};

const ops = {
  state() {},
  type: (text) => insert(text),
  key: (name) => keys[name](),
  move: (offset) => moveTo(offset),
  click: (offset) => moveTo(offset, 2),
  save: () => fire("save", document),
  command: (name) => registered[`localspec.${name}`](),
  set: (name, value) => ((overrides[name] = value), fire("configuration", { affectsConfiguration: () => true })),
};

const vscode = {
  ...{ Position, Range, Selection: Range, ThemeColor: class {} },
  InlineCompletionItem: class {
    constructor(insertText, range) {
      Object.assign(this, { insertText, range });
    }
  },
  TextEditorSelectionChangeKind: { Keyboard: 1, Mouse: 2, Command: 3 },
  InlineCompletionTriggerKind: { Invoke: 0, Automatic: 1 },
  StatusBarAlignment: { Right: 2 },
  languages: {
    registerInlineCompletionItemProvider: (selector, given) => (provider = given),
    getDiagnostics: () => [{ range: new Range(0, 0, 0, 1), severity: 1, message: "unused" }],
  },
  commands: {
    registerCommand: (name, act) => (registered[name] = act),
    async executeCommand(name, ...given) {
      if (name === "setContext") contexts[given[0]] = given[1];
      else if (name.endsWith("inlineSuggest.hide")) ghost = [];
      else if (name.endsWith("inlineSuggest.trigger")) await suggest(0);
      else await registered[name](...given);
    },
  },
  window: {
    activeTextEditor: editor,
    createStatusBarItem: () => item,
    createTextEditorDecorationType: (options) => options,
    createTerminal: (options) => ({ show: () => messages.push(options) }),
    showQuickPick: async (rows) => (messages.push(rows), rows.at(-1)),
    showErrorMessage: (text) => messages.push(text),
    showWarningMessage: (text) => messages.push(text),
    setStatusBarMessage: (text) => messages.push(text),
    ...{ onDidChangeActiveTextEditor: on("active"), onDidChangeTextEditorSelection: on("selection") },
  },
  workspace: {
    getConfiguration() {
      const entries = Object.entries(manifest.contributes.configuration.properties);
      const defaults = Object.fromEntries(entries.map(([name, { default: value }]) => [name.split(".")[1], value]));
      return { ...defaults, ...overrides, update: async (name, value) => ops.set(name, value) };
    },
    asRelativePath: (uri) => uri.path.split("/").pop(),
    ...{ onDidSaveTextDocument: on("save"), onDidChangeTextDocument: on("text"), onDidChangeConfiguration: on("configuration") },
  },
};

const load = Module._load;
Module._load = (name, ...others) => (name === "vscode" ? vscode : load(name, ...others));
require(`${folder}/main.js`).activate({ subscriptions: [], extension: { packageJSON: manifest } });

readline.createInterface({ input: process.stdin }).on("line", (line) => {
  const [op, ...given] = JSON.parse(line);
  ops[op](...given);
  setImmediate(() => {
    const [removed = [], added = []] = [...drawn.values()];
    const state = { text: document.text, offset: document.offsetAt(editor.selection.active), ghost, contexts, messages, settings: overrides };
    Object.assign(state, { status: item.text, tooltip: item.tooltip });
    Object.assign(state, { removed: removed.map((range) => document.getText(range)) });
    Object.assign(state, { added: added.map((each) => each.renderOptions.after.contentText.replace(/\u00a0/g, " ")) });
    process.stdout.write(`${JSON.stringify(state)}\n`);
  });
}).on("close", () => process.exit());
