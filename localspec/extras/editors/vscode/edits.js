// Next edits: changes are noted, the daemon proposes the next one, and Tab takes it.
"use strict";
const context = require("./context");

const PAUSE_MS = 400; // without a key, until a proposal is asked for
const WINDOW_LINES = 10; // above and below the cursor
const MAX_LINES = 20000; // of a document whose changes are noted
const SEVERITIES = ["error", "warning", "information", "hint"];
// How lines are drawn over those below, which the editor's interface for extensions has no means for.
const INSERTED = "var(--vscode-diffEditor-insertedTextBackground)";
const BELOW = `position: absolute; left: 0; width: 100vw; z-index: 1; background-image: linear-gradient(${INSERTED}, ${INSERTED})`;

const ended = (lines) => lines.map((line) => `${line}\n`).join("");
const key = ({ document, old, new: lines }) => JSON.stringify([document.uri, old, lines]);

// Return how many elements two sequences have in common at their beginnings, and then at their ends.
function common(one, other) {
  const most = Math.min(one.length, other.length);
  let [start, end] = [0, 0];
  while (start < most && one[start] === other[start]) start++;
  while (end < most - start && one[one.length - 1 - end] === other[other.length - 1 - end]) end++;
  return [start, end];
}

class NextEdit {
  constructor(vscode, desk, ghost) {
    const make = vscode.window.createTextEditorDecorationType;
    const removed = make({ backgroundColor: new vscode.ThemeColor("diffEditor.removedTextBackground") });
    Object.assign(this, { vscode, desk, ghost, removed, added: make({}), hunks: [] });
    Object.assign(this, { lines: new WeakMap(), recent: [], rejected: new Set() });
  }

  changed({ document, contentChanges }) {
    if (!contentChanges.length || this.isAccepting || !this.desk.wants(document)) return;
    this.drop();
    this.schedule();
  }

  // Note how a document was changed since this was called last, with three lines of context.
  note(document) {
    const [old, lines] = [this.lines.get(document), document.getText().split(/\r?\n/)];
    this.lines.set(document, lines);
    if (!old || lines.length > MAX_LINES) return;
    const [start, end] = common(old, lines).map((count) => Math.max(count - 3, 0));
    const edit = { path: this.path(document), line: start + 1 };
    [edit.old, edit.new] = [old, lines].map((each) => ended(each.slice(start, each.length - end)));
    const last = this.recent.at(-1);
    if (last?.path === edit.path && last.line === edit.line && last.new === edit.old) edit.old = this.recent.pop().old;
    if (edit.old !== edit.new) this.recent = [...this.recent, edit].slice(-8);
  }

  path(document) {
    return this.vscode.workspace.asRelativePath(document.uri);
  }

  schedule() {
    clearTimeout(this.timer);
    if (this.desk.settings().nextEdit) this.timer = setTimeout(() => this.propose(false), PAUSE_MS);
  }

  // Ask for a proposal. Unless a person asks, ghost text and its request come first.
  async propose(isAsked) {
    const editor = this.vscode.window.activeTextEditor;
    if (!editor || !this.desk.wants(editor.document)) return;
    const { document, selection } = editor;
    if (!isAsked && this.ghost.isBusy) return this.schedule();
    this.note(document);
    if (!isAsked && (!this.recent.length || this.ghost.left(document, selection.active)?.length)) return;
    this.drop();
    const { version } = document;
    const first = Math.max(0, selection.active.line - WINDOW_LINES);
    this.controller = new AbortController();
    try {
      const fields = this.fields(document, selection.active, first);
      const { edits } = await this.desk.ask("/localspec/next-edit", fields, this.controller.signal);
      if (document.version !== version || this.vscode.window.activeTextEditor !== editor) return;
      const hunks = edits.map((edit) => ({ ...edit, document, line: first + edit.start }));
      this.show(editor, hunks.filter((hunk) => !this.rejected.has(key(hunk))));
      if (isAsked && !this.hunks.length) this.vscode.window.setStatusBarMessage("localspec: nothing to propose", 3000);
    } catch (error) {
      if (isAsked && !this.controller.signal.aborted) throw error;
    }
  }

  fields(document, cursor, first) {
    const end = cursor.line + WINDOW_LINES;
    const window = context.join(document, first, end + 1);
    const before = context.join(document, first, cursor.line).length + cursor.character;
    const diagnostics = this.vscode.languages.getDiagnostics(document.uri).slice(0, 20);
    const told = ({ range, severity, message }) => ({ line: range.start.line + 1, severity: SEVERITIES[severity], message });
    return {
      ...{ path: this.path(document), language: document.languageId, first_line: first + 1, edits: this.recent },
      ...{ above: context.above(document, first), below: context.below(document, end) },
      ...{ before: window.slice(0, before), after: window.slice(before) },
      diagnostics: diagnostics.map(told),
    };
  }

  // Show the first of the changes as it will be: within its lines, or below them if their number changes.
  show(editor, hunks) {
    const { Range, ThemeColor, commands } = this.vscode;
    const [removed, added] = [[], []];
    const add = (line, column, text, color, css) => {
      const contentText = text.replace(/\t/g, " ".repeat(editor.options.tabSize)).replace(/ /g, "\u00a0");
      const after = { contentText, backgroundColor: new ThemeColor(color), textDecoration: `none; ${css}` };
      added.push({ range: new Range(line, column, line, column), renderOptions: { after } });
    };
    const [{ line, old, new: lines } = { old: [], new: [] }] = hunks;
    const isPaired = old.length === lines.length;
    old.forEach((text, index) => {
      const [start, end] = isPaired ? common(text, lines[index]) : [0, 0];
      removed.push(new Range(line + index, start, line + index, text.length - end));
      const inserted = isPaired && lines[index].slice(start, lines[index].length - end);
      if (inserted) add(line + index, text.length - end, inserted, "diffEditor.insertedTextBackground", "");
    });
    const end = line + old.length; // lines that come before all others are drawn over the first
    const top = (index) => `${BELOW}; top: ${100 * (index + (end > 0))}%`;
    if (!isPaired) lines.forEach((text, index) => add(Math.max(end - 1, 0), 0, text || " ", "editor.background", top(index)));
    editor.setDecorations(this.removed, removed);
    editor.setDecorations(this.added, added);
    Object.assign(this, { editor, hunks });
    commands.executeCommand("setContext", "localspec.proposed", hunks.length > 0);
    if (hunks.length) commands.executeCommand("editor.action.inlineSuggest.hide");
  }

  // Take the first change, or scroll to it if it is not in sight.
  async accept() {
    const { Position, Range, Selection } = this.vscode;
    const { editor, hunks: [{ document, line, old, new: lines }, ...others] } = this;
    let [start, end] = [new Position(line, 0), new Position(line + old.length, 0)];
    if (!editor.visibleRanges.some((range) => range.contains(start))) return editor.revealRange(new Range(start, start), 1);
    let text = ended(lines);
    if (end.line >= document.lineCount) { // the last line has no end
      if (line > 0) start = document.lineAt(line - 1).range.end;
      end = document.lineAt(document.lineCount - 1).range.end;
      text = (line > 0 && lines.length ? "\n" : "") + lines.join("\n");
    }
    this.isAccepting = true;
    await editor.edit((builder) => builder.replace(new Range(start, end), text));
    this.isAccepting = false;
    const at = document.validatePosition(new Position(line + Math.max(lines.length - 1, 0), Infinity));
    editor.selection = new Selection(at, at);
    this.show(editor, others.map((hunk) => ({ ...hunk, line: hunk.line + lines.length - old.length })));
    if (!others.length) this.schedule();
  }

  reject() {
    this.hunks.forEach((hunk) => this.rejected.add(key(hunk)));
    this.drop();
  }

  drop() {
    this.controller?.abort();
    if (this.hunks.length) this.show(this.editor, []);
  }
}

module.exports = { NextEdit };
