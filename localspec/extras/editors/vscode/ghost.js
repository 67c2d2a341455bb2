// Ghost text: the suggestion at the cursor. The editor draws it, and asks for it after every key.
"use strict";
const context = require("./context");

const MAX_CHOICES = 4;
const SAMPLING = { top_k: 40, top_p: 0.99, samplers: ["top_k", "top_p", "infill"] };
const DRAWN = { ...SAMPLING, samplers: ["top_k", "top_p", "temperature", "infill"], temperature: 0.8 };
const BLANK_END = /[ \t\n]+$/;

// Return a suggestion without text that follows the cursor already, as `trim_suggestion` of lsp.py does.
function trim(text, after, below) {
  const lines = text.replace(/\r/g, "").replace(BLANK_END, "").split("\n");
  const rest = after.trim();
  if (rest) return lines[0].endsWith(rest) ? lines[0].slice(0, -rest.length) : lines[0];
  for (let count = Math.min(below.length, lines.length - 1); count > 0; count--) {
    const same = below.slice(0, count).join("\n");
    if (!same.trim() || same !== lines.slice(-count).join("\n")) continue;
    return lines.slice(0, -count).join("\n").replace(BLANK_END, "");
  }
  return lines.join("\n");
}

class Ghost {
  constructor(vscode, desk) {
    Object.assign(this, { vscode, desk, got: null, isContinued: false, timer: null, announced: null });
  }

  // What the editor calls. A suggestion that is being typed goes on without a request.
  async provideInlineCompletionItems(document, position, { triggerKind }, token) {
    this.announced?.abort();
    if (!this.desk.wants(document) || this.desk.hasProposal()) return [];
    if (!this.left(document, position)) {
      this.stop();
      const { text } = document.lineAt(position.line);
      const [before, after] = [text.slice(0, position.character), text.slice(position.character)];
      const below = context.join(document, position.line + 1, position.line + 65).split("\n");
      this.got = { document, position, before, after, below, texts: [], controller: new AbortController() };
      this.request(this.got, SAMPLING);
    } else if (triggerKind === this.vscode.InlineCompletionTriggerKind.Invoke && !this.isContinued) {
      const { isDone, texts } = this.got; // a key asks for another one
      if (isDone && texts.length < MAX_CHOICES) this.request(this.got, { ...DRAWN, seed: texts.length });
    }
    const { got } = this;
    token.onCancellationRequested(() => got === this.got && !got.isShown && this.stop());
    await got.ready;
    if (token.isCancellationRequested || got !== this.got) return [];
    const texts = this.left(document, position) ?? [];
    got.isShown = texts.length > 0;
    return texts.map((text) => new this.vscode.InlineCompletionItem(text, new this.vscode.Range(position, position)));
  }

  // Return what is left of the suggestions at a position; undefined if they are for another one.
  left(document, position) {
    const { got } = this;
    if (got?.document !== document || position.isBefore(got.position)) return undefined;
    const { line, character } = got.position;
    const after = document.lineAt(position.line).text.slice(position.character);
    if (document.lineAt(line).text.slice(0, character) !== got.before || after !== got.after) return undefined;
    const typed = document.getText(new this.vscode.Range(got.position, position)).replace(/\r\n/g, "\n");
    const texts = [...new Set(got.texts.map((text) => trim(text, got.after, got.below)))];
    const left = texts.filter((text) => text.length > typed.length && text.startsWith(typed));
    return left.length || !typed ? left.map((text) => text.slice(typed.length)) : undefined;
  }

  // Ask for one more suggestion. `ready` resolves with the first line of the first one; the rest is shown later.
  request(got, sampling) {
    const { tokens, patience } = this.desk.settings();
    const number = got.texts.length;
    const limits = { n_predict: tokens, t_max_predict_ms: patience, stop: got.after.trim() ? ["\n"] : [] };
    const told = { stream: true, localspec: { kind: "complete" }, response_fields: ["content", "model", "timings"] };
    const fields = { ...context.fields(got.document, got.position), ...limits, ...sampling, ...told };
    let text = "";
    got.isDone = false;
    got.ready = new Promise((resolve) => {
      const event = ({ content }) => {
        text += content ?? "";
        if (number || !text.trimStart().includes("\n")) return;
        got.texts[0] = text.slice(0, text.lastIndexOf("\n"));
        resolve();
      };
      const asked = this.desk.ask("/infill", fields, got.controller.signal, event);
      asked.then(() => (got.texts[number] = text), () => {}).then(() => this.ended(got, resolve));
    });
  }

  // Show what has come after the first line.
  async ended(got, resolve) {
    got.isDone = true;
    resolve();
    const editor = this.vscode.window.activeTextEditor;
    if (got !== this.got || !got.isShown || !this.left(editor?.document, editor?.selection.active)?.length) return;
    this.isContinued = true;
    await this.vscode.commands.executeCommand("editor.action.inlineSuggest.trigger");
    this.isContinued = false;
  }

  // A document was opened or saved, or the cursor went elsewhere: the first suggestion there finds its prompt
  // read. The next key or anybody's request ends it.
  announce(editor) {
    clearTimeout(this.timer);
    this.announced?.abort();
    this.timer = setTimeout(() => {
      const { document, selection } = editor;
      if (!this.desk.wants(document) || this.isBusy) return;
      this.announced = new AbortController();
      const fields = { ...context.fields(document, selection.active), n_predict: 0, response_fields: [""] };
      this.desk.readAhead({ ...fields, localspec: { ahead: true } }, this.announced.signal);
    }, 200);
  }

  get isBusy() {
    return this.got !== null && !this.got.isDone;
  }

  stop() {
    this.got?.controller.abort();
    this.got = null;
  }
}

module.exports = { Ghost, trim };
