// Requests to the daemon: HTTP over its Unix socket. A request that finds no daemon starts it.
"use strict";
const { execFile } = require("child_process");
const http = require("http");

// A daemon that is killed still takes connections for a moment, and resets them.
const NO_DAEMON = ["ENOENT", "ECONNREFUSED", "ECONNRESET", "EPIPE"];
let starting = null; // the promise of a start under way
let failed = null; // why the last start failed; only a person has it tried again
let told = ""; // the socket, as `localspec start` printed it

function findSocket({ socket }) {
  const { LOCALSPEC_HOME: home, XDG_RUNTIME_DIR: runtime = "/run/user/none" } = process.env;
  return socket || told || (home ? `${home}/run/localspec.sock` : `${runtime}/localspec/localspec.sock`);
}

// Start the daemon; all who ask at the same time wait for one start. Throws the last line of its error.
function start({ command: [program, ...first] }) {
  starting ??= new Promise((resolve, reject) => {
    execFile(program, [...first, "start", "--json"], (error, out, err) => {
      failed = error && new Error(err.trim().split("\n").pop() || error.message);
      return failed ? reject(failed) : resolve((told = JSON.parse(out).socket));
    });
  }).finally(() => (starting = null));
  return starting;
}

// Return the answer; the events of a stream go to `event`. Aborting `signal` closes the connection, by which
// the daemon knows that nobody waits.
async function ask(settings, path, fields, signal, event) {
  try {
    return await send(settings, path, fields, signal, event);
  } catch (error) {
    if (!error.isUnanswered || !NO_DAEMON.includes(error.code)) throw error;
    if (!settings.start) throw new Error("The daemon is not running. To start it: localspec start");
    if (failed) throw failed;
    await start(settings);
    return send(settings, path, fields, signal, event);
  }
}

async function send(settings, path, fields, signal, event) {
  const headers = { "content-type": "application/json", "user-agent": "localspec-vscode" };
  const options = { socketPath: findSocket(settings), path, method: fields ? "POST" : "GET", headers, signal, agent: false };
  const response = await new Promise((resolve, reject) => {
    const refuse = (error) => reject(Object.assign(error, { isUnanswered: true }));
    http.request(options, resolve).on("error", refuse).end(fields && JSON.stringify(fields));
  });
  let rest = "";
  for await (const piece of response.setEncoding("utf8")) {
    const lines = (rest + piece).split("\n");
    rest = lines.pop();
    for (const line of lines) if (line.startsWith("data: {")) event(parse(line.slice(6)));
  }
  return rest && parse(rest);
}

// Parse an object. Throws the error that it reports, if it is one.
function parse(text) {
  const object = JSON.parse(text);
  if (object.error) throw Object.assign(new Error(object.error.message), { type: object.error.type });
  return object;
}

module.exports = { ask, start };
