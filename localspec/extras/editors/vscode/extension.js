// The extension: its commands, its item in the status bar, and what ghost text and next edits share.
"use strict";
const context = require("./context");
const daemon = require("./daemon");
const { Ghost } = require("./ghost");
const { NextEdit } = require("./edits");

const SCHEMES = ["file", "untitled", "vscode-notebook-cell"];
const MENU = ["nextEdit", "choosePair", "toggle", "start", "status", "log"];

// `command` is the program that installed the extension, and its first arguments.
module.exports = function activate(vscode, extension, command) {
  const { commands, window, workspace } = vscode;
  const state = { busy: 0, model: "", speed: "", error: "", note: "localspec" };
  const item = window.createStatusBarItem("localspec", vscode.StatusBarAlignment.Right, 100);
  const configure = (name, value) => workspace.getConfiguration("localspec").update(name, value, true);
  const desk = {
    settings() {
      const values = { ...workspace.getConfiguration("localspec") };
      return { ...values, command: values.command?.length ? values.command : command };
    },
    wants(document) {
      const { enabled, languages } = desk.settings();
      return enabled && languages[document.languageId] !== false && SCHEMES.includes(document.uri.scheme);
    },
    hasProposal: () => edits.hunks.length > 0,
    // Have a prompt read while nobody waits. No daemon is started for it, and nothing is shown.
    readAhead(fields, signal) {
      const settings = { ...desk.settings(), start: false };
      const model = settings.model ? { model: settings.model } : {};
      daemon.ask(settings, "/infill", { ...fields, ...model }, signal, () => {}).catch(() => {});
    },
    // Ask the daemon, and show in the status bar that it works and what came of it.
    async ask(path, fields, signal, event) {
      const [settings, since] = [desk.settings(), Date.now()];
      let last = {};
      const took = (part) => event((last = part));
      if (fields && settings.model) fields = { ...fields, model: settings.model };
      draw({ busy: state.busy + 1 });
      try {
        const answer = await daemon.ask(settings, path, fields, signal, took);
        const { model = state.model, timings } = answer || last;
        const speed = timings?.predicted_n > 1 ? ` ${Math.round(timings.predicted_per_second)} t/s` : state.speed;
        draw({ model, speed, error: "", note: `localspec: the last answer took ${Date.now() - since} ms` });
        return answer;
      } catch (error) {
        if (!signal?.aborted && error.type !== "cancelled") draw({ error: error.message });
        throw error;
      } finally {
        draw({ busy: state.busy - 1 });
      }
    },
  };
  const ghost = new Ghost(vscode, desk);
  const edits = new NextEdit(vscode, desk, ghost);

  function draw(changes) {
    const { busy, model, speed, error, note } = Object.assign(state, changes);
    const isOn = desk.settings().enabled;
    const icon = !isOn ? "circle-slash" : busy ? "loading~spin" : error ? "warning" : "sparkle";
    const text = `$(${icon}) ${model || "localspec"}${isOn ? speed : ""}`;
    Object.assign(item, { text, tooltip: error || note, command: "localspec.menu" }).show();
    commands.executeCommand("setContext", "localspec.busy", busy > 0);
  }

  function inTerminal(...words) {
    const [shellPath, ...first] = desk.settings().command;
    window.createTerminal({ name: "localspec", shellPath, shellArgs: [...first, ...words] }).show();
  }

  const actions = {
    async menu() {
      const known = extension.extension.packageJSON.contributes.commands;
      const rows = MENU.map((name) => ({ name, label: known.find((each) => each.command === `localspec.${name}`).title }));
      const chosen = await window.showQuickPick(rows, { title: item.tooltip });
      if (chosen) await commands.executeCommand(`localspec.${chosen.name}`);
    },
    async choosePair() {
      const { data } = await desk.ask("/v1/models");
      const rows = [{ label: "", description: "the configured pair" }, ...data.map(({ id }) => ({ label: id }))];
      const chosen = await window.showQuickPick(rows, { title: "The pair that answers" });
      if (chosen) await configure("model", chosen.label);
    },
    toggle: () => configure("enabled", !desk.settings().enabled),
    start: () => daemon.start(desk.settings()).then(() => draw({ error: "" })),
    status: () => inTerminal("status", "--watch"),
    log: () => inTerminal("logs", "--follow"),
    nextEdit: () => edits.propose(true),
    acceptEdit: () => edits.accept(),
    rejectEdit: () => edits.reject(),
    cancel() {
      ghost.stop();
      edits.drop();
      return commands.executeCommand("editor.action.inlineSuggest.hide");
    },
  };
  const fail = (error) => void window.showErrorMessage(`localspec: ${error.message}`);
  const guarded = (act) => () => Promise.resolve().then(act).catch(fail);
  const register = ([name, act]) => commands.registerCommand(`localspec.${name}`, guarded(act));

  let last = null; // the place of the cursor in the active editor
  function activated(editor) {
    if (last) context.leave(last);
    actions.cancel();
    for (const each of [last, editor]) if (each) edits.note(each.document);
    last = editor && { document: editor.document, line: editor.selection.active.line };
    if (editor) ghost.announce(editor);
  }
  function moved({ textEditor, kind }) {
    if (textEditor !== window.activeTextEditor) return;
    const { document, selection } = textEditor;
    last = { document, line: selection.active.line };
    if (ghost.isBusy && !ghost.left(document, selection.active)) ghost.stop();
    if (kind > vscode.TextEditorSelectionChangeKind.Keyboard) ghost.announce(textEditor);
    if (desk.hasProposal() && Math.abs(edits.hunks[0].line - last.line) > 20) edits.drop();
  }
  extension.subscriptions.push(
    ...[item, { dispose: actions.cancel }, ...Object.entries(actions).map(register)],
    vscode.languages.registerInlineCompletionItemProvider(SCHEMES.map((scheme) => ({ scheme })), ghost),
    workspace.onDidSaveTextDocument((saved) => saved === window.activeTextEditor?.document && ghost.announce(window.activeTextEditor)),
    workspace.onDidChangeTextDocument((event) => edits.changed(event)),
    workspace.onDidChangeConfiguration((event) => event.affectsConfiguration("localspec") && (actions.cancel(), draw({}))),
    window.onDidChangeActiveTextEditor(activated),
    window.onDidChangeTextEditorSelection(moved),
  );
  activated(window.activeTextEditor);
  draw({});
};
