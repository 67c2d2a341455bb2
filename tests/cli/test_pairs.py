"""Test the commands for pairs: pull, list, show, add, rm, gc, drafts, and their errors."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from benchmarks.synthetic import Shape, draft_cycle, target_cycle, write_model, write_pair
from benchmarks.synthetic_block import write_block
from benchmarks.synthetic_eagle import write_eagle
from benchmarks.synthetic_heads import TINY_HEADS, write_heads
from localspec.cli.terminal.pairs import drafts
from localspec.protocol.pairs import DraftGain, Drafts, DraftView
from tests.support.daemons import FAKE_WORKER, ROOT, wait_for
from tests.support.patience import PATIENCE
from tests.support.pulling import PullingHome, pulling_home
from tests.support.terminal import ESCAPES, terminal


@pytest.fixture
def home(tmp_path: Path) -> Iterator[PullingHome]:
    with pulling_home(tmp_path) as home:
        yield home


@pytest.fixture
def slow(home: PullingHome) -> PullingHome:
    """Return a home whose hub is so slow that a pull takes some seconds."""
    home.hub.rate = 300_000
    return home


def use_scripted_engine(home: PullingHome) -> PullingHome:
    """Let a home use the scripted engine, which needs no llama.cpp."""
    home.environment["LOCALSPEC_ENGINE"] = f"{sys.executable} {FAKE_WORKER}"
    return home


def list_pulls(home: PullingHome) -> dict[str, dict[str, object]]:
    return {pull["name"]: pull for pull in json.loads(home.run("pulls", "--json").stdout)}


def test_a_pair_is_pulled_used_and_removed(home: PullingHome) -> None:
    assert "tiny" not in home.run("list").stdout
    run = home.run("ask", "-m", "tiny", "hi")
    assert (run.returncode, run.stderr) == (
        1,
        "localspec: The pair 'tiny' is not pulled yet; run: localspec pull tiny\n",
    )
    run = home.run("pull", "little")  # little is an alias of tiny.
    assert run.returncode == 0, run.stderr
    forecast, installed = run.stdout.splitlines()
    assert re.match(
        r"Forecast: about [\d,.]+ \(.*\) tokens/s without drafts, .* is unknown", forecast
    )
    assert installed == 'tiny is installed (966 KiB). Try: localspec ask -m tiny "…"'
    assert re.search(r"^tiny +966 KiB +chat +two small models$", home.run("list").stdout, re.M)
    run = home.run("ask", "-m", "little", "-n", "8", "-u", "hi")
    assert run.returncode == 0, run.stderr
    assert "drafted" in run.stderr
    names = [model["id"] for model in home.request("GET", "/v1/models").json["data"]]
    assert names == ["builtin", "tiny"]
    assert home.run("rm", "-y", "tiny").stdout == "Removed tiny; 966 KiB freed.\n"
    assert home.run("unload").stdout == "No pair is loaded.\n"
    assert home.run("gc", "-y").stdout == "Nothing to delete.\n"
    assert home.run("ask", "-m", "tiny", "hi").returncode == 1


def test_show_describes_a_pair(home: PullingHome) -> None:
    home.run("pull", "tiny")
    output = home.run("show", "tiny", "--context", "512").stdout
    assert "own/target at 0123456789ab" in output
    assert re.search(r"^tokenizers +match$", output, re.M)
    assert "with 512 tokens of context" in output
    view = json.loads(home.run("show", "tiny", "--json").stdout)
    assert view["matched"] is True
    assert view["fit"]["draft"] is True
    output = home.run("show", "builtin").stdout
    assert "match" in output
    assert "target.gguf, 11.9 MiB, Q8_0 (Q8_0 100%)" in output
    assert re.search(r"chat template of \d+ characters \([0-9a-f]{12}…\), without tools", output)
    assert "supports fill-in-the-middle (FIM)" in output
    assert "licence PSF-2.0 AND MIT" in output
    assert re.search(r"^drafts +a draft model", output, re.M)
    assert re.search(r"^tool calls +explained to the model in the question$", output, re.M)
    assert "<|assistant|>" in home.run("show", "builtin", "--template").stdout
    for name in ("a/b", "", "a/../b"):
        run = home.run("show", name)
        assert (run.returncode, run.stdout) == (1, "")
        assert run.stderr.startswith(f"localspec: There is no pair '{name}'.")


def test_the_catalogue_shows_which_pairs_fit(home: PullingHome) -> None:
    output = home.run("catalogue").stdout
    assert "coder-7b" in output
    assert "of memory free" in output
    listed = json.loads(home.run("list", "--all", "--json").stdout)
    fits = {pair["name"]: pair["fits"] for pair in listed["pairs"]}
    fitting = home.run("catalogue", "--fits").stdout
    for name in ("smollm2", "llama33-70b"):
        assert (name in fitting) == (fits[name] != "no")


def test_edits_of_the_catalogue_apply_and_mistakes_are_named(home: PullingHome) -> None:
    use_scripted_engine(home)
    home.run("list")
    catalogue = home.catalogue.read_text()
    home.catalogue.write_text(catalogue.replace("pairs.tiny", "pairs.other"))
    wait_for(lambda: "other" in home.run("list", "--all").stdout, "the new name")
    home.catalogue.write_text(catalogue + "nonsense = 1\n")
    wait_for(lambda: home.status()["problems"], "the problem")
    run = home.run("list", "--all")
    assert "other" in run.stdout  # The last valid catalogue is still in use.
    assert "The last good catalogue stays in use." in run.stderr
    assert "models.toml, line 11, pairs.tiny.draft.nonsense" in run.stderr
    assert "problem" in home.run("status").stdout
    home.catalogue.write_text(catalogue)
    wait_for(lambda: not home.status()["problems"], "the cure")


def test_an_edit_of_the_configuration_is_used_from_the_next_load(home: PullingHome) -> None:
    use_scripted_engine(home)
    home.run("pull", "tiny")
    config = home.catalogue.with_name("config.toml")
    config.write_text('pair = "tiny"\n')
    wait_for(lambda: home.status()["pair"]["name"] == "tiny", "the new pair")
    config.write_text("pair = 3\n")
    (problem,) = wait_for(lambda: home.status()["problems"], "the problem")
    assert "'pair' must be text" in problem or "'pair' must be" in problem
    assert home.run("ask", "say hello").stdout == "hello\n"


def test_ctrl_c_leaves_the_pull_running_and_says_so(slow: PullingHome) -> None:
    process = slow.open_command("pull", "tiny")
    wait_for(lambda: slow.hub.sent > 150_000, "some bytes")
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=PATIENCE)
    slow.hub.rate = 1e3  # Slow enough to be still running at the last of these checks.
    assert process.returncode == -signal.SIGINT
    assert "The pull of tiny continues in the daemon. To watch it: localspec pull tiny" in stderr
    assert list_pulls(slow)["tiny"]["state"] == "downloading"
    assert "downloading" in slow.run("pulls").stdout
    assert "1 running" in slow.run("status").stdout
    slow.hub.rate = 0
    # The command joins the running pull and waits for its end.
    assert slow.run("pull", "tiny").returncode == 0
    assert slow.hub.sent < 1_100_000  # The 989 kB were transferred once.


@pytest.mark.parametrize("columns", [30, 100])
def test_ctrl_c_in_a_terminal_ends_the_bar_with_a_new_line(slow: PullingHome, columns: int) -> None:
    with terminal(slow.environment, "pull", "tiny", columns=columns) as session:
        session.expect("%")
        slow.hub.rate = 1e3  # It is still running at the last of these checks.
        session.interrupt()
        assert session.wait() == -signal.SIGINT
        assert "To watch it: localspec pull tiny" in " ".join(session.text.split())
        # Lines that are redrawn must fit, or the window would scroll.
        raw = session.raw.replace("^C", "")  # Remove the terminal's echo.
        parts = [part for part in re.split(r"[\r\n]", raw) if "%" in part]
        assert max(len(ESCAPES.sub("", part)) for part in parts) <= columns
    assert list_pulls(slow)["tiny"]["state"] == "downloading"


def test_a_pull_is_cancelled_and_continued(slow: PullingHome) -> None:
    assert slow.run("pull", "tiny", "--no-wait").stdout == (
        "Pulling tiny; to see its progress: localspec pulls\n"
    )
    wait_for(lambda: slow.hub.sent > 300_000, "some bytes")
    slow.hub.rate = 3e4  # It is still running when it is cancelled, and notices that soon.
    assert "A pull is running" in slow.run("gc", "-y").stderr
    run = slow.run("pulls", "cancel", "little")
    assert (
        run.stdout
        == "The pull was cancelled; anything already downloaded is kept for the next one.\n"
    )
    assert list_pulls(slow)["tiny"]["state"] == "cancelled"
    slow.hub.rate, bytes_sent = 0, slow.hub.sent
    assert slow.run("pull", "tiny").returncode == 0
    assert slow.hub.sent - bytes_sent < 989_000  # Only the rest is transferred.
    ended = slow.run("pulls", "cancel", "tiny")
    assert ended.stdout == "The pull of tiny is complete, and is no longer listed.\n"
    slow.hub.files.clear()
    assert slow.run("pull", "maker/other").returncode == 1
    ended = slow.run("pulls", "cancel", "maker-other")
    assert ended.stdout == "The pull of maker-other has failed, and is no longer listed.\n"
    assert not list_pulls(slow)
    assert slow.run("pulls", "cancel", "nope").stderr == (
        "localspec: There is no pull of 'nope'; see: localspec pulls\n"
    )


def test_a_daemon_that_ends_during_a_pull_loses_no_data(slow: PullingHome) -> None:
    for signal_number in (signal.SIGKILL, signal.SIGTERM):
        bytes_sent = slow.hub.sent
        process = slow.open_command("pull", "tiny")
        wait_for(lambda bytes_sent=bytes_sent: slow.hub.sent > bytes_sent + 250_000, "some bytes")  # type: ignore[misc]
        os.kill(int((slow.root / "run" / "daemon.lock").read_text()), signal_number)
        _, stderr = process.communicate(timeout=PATIENCE)
        assert process.returncode in (1, 3), stderr
        assert len(stderr.strip().splitlines()[-1]) > 30
    slow.hub.rate = 0
    assert slow.run("pull", "tiny").returncode == 0
    assert slow.hub.sent < 2 * 989_000


def test_a_terminal_gets_a_bar_and_a_pipe_quiet_lines(slow: PullingHome) -> None:
    slow.hub.rate = 500_000
    leader, follower = pty.openpty()
    terminal = slow.open_command("pull", "tiny", stdout=subprocess.DEVNULL, stderr=follower)
    os.close(follower)
    piped = slow.open_command("pull", "tiny")
    output = b""
    with contextlib.suppress(OSError):  # A terminal reports its end as an error.
        while data := os.read(leader, 4096):
            output += data
    os.close(leader)
    assert terminal.wait(timeout=PATIENCE) == 0
    stdout, lines = piped.communicate(timeout=PATIENCE)
    assert "\ntiny is installed" in stdout
    text = output.decode()
    assert "░" in text
    assert re.search(r"\d+%  \d+ KiB of 966 KiB  \d+ KiB/s  \d+ s left", text)
    assert "\x1b" not in lines
    assert "\r" not in lines
    assert "tiny  downloading" in lines


def test_models_that_do_not_match_are_refused_by_their_headers(home: PullingHome) -> None:
    mismatched = home.root / "other.gguf"
    shape = Shape(1, 64, 128, 4, 300)
    write_model(mismatched, shape, target_cycle(300))
    home.hub.add("own/draft", "draft.gguf", mismatched.read_bytes())
    run = home.run("pull", "tiny")
    assert run.returncode == 1
    assert "target.gguf and draft.gguf: " in run.stderr
    assert "tiny" not in home.run("list").stdout


def test_a_gated_repository_is_named_and_the_token_stays_secret(home: PullingHome) -> None:
    home.hub.files["own/target", "target.gguf"].faults.gated = True
    run = home.run("pull", "tiny")
    assert run.returncode == 1
    assert "own/target is gated: accept its terms at" in run.stderr
    # The daemon has no token in its environment; the client's token is used.
    home.environment["HF_TOKEN"] = home.hub.token
    assert home.run("pull", "tiny").returncode == 0
    output = home.log.read_text() + home.run("pulls", "--json").stdout
    assert home.hub.token not in output
    assert "signature=" not in output


def test_a_login_page_and_a_wrong_hash(home: PullingHome) -> None:
    faults = home.hub.files["own/draft", "draft.gguf"].faults
    faults.portal = True
    assert (
        "with a page of its own (perhaps the network's login page"
        in home.run("pull", "tiny").stderr
    )
    faults.portal, faults.corrupt = False, True
    run = home.run("pull", "tiny")
    assert run.returncode == 1
    assert "SHA-256" in run.stderr
    assert "tiny" not in home.run("list").stdout


def test_a_damaged_file_is_found_and_not_loaded(home: PullingHome) -> None:
    use_scripted_engine(home)
    home.run("pull", "tiny")
    (blob,) = [path for path in (home.store / "blobs").glob("*.gguf") if path.stat().st_size > 5e5]
    data = bytearray(blob.read_bytes())
    data[-1] ^= 1
    blob.write_bytes(data)
    run = home.run("verify", "tiny")
    assert run.returncode == 1
    assert "target.gguf is damaged: its SHA-256 does not match the recorded one." in run.stdout
    assert run.stderr.endswith("1 of 2 files are unusable. Run: localspec pull tiny\n")
    run = home.run("ask", "-m", "tiny", "hi")
    assert run.returncode == 1
    assert "target.gguf is damaged" in run.stderr
    blob.write_bytes(data[:1000])
    assert "has 1000 bytes but should have" in home.run("ask", "-m", "tiny", "hi").stderr
    bytes_sent = home.hub.sent
    run = home.run("pull", "tiny")
    assert run.returncode == 0, run.stderr
    # At most the header of the other file is transferred.
    assert home.hub.sent - bytes_sent < 1.05 * len(data) + 70_000
    assert "target.gguf: OK" in home.run("verify", "tiny").stdout
    assert home.run("ask", "-m", "tiny", "say x").stdout == "x\n"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_store_that_cannot_be_written(home: PullingHome) -> None:
    home.store.mkdir(parents=True, mode=0o500)
    assert "cannot be written" in home.run("pull", "tiny").stderr


def test_a_full_disk_is_reported_with_numbers(home: PullingHome) -> None:
    home.store.mkdir(parents=True)
    localspec = f"{sys.executable} -m localspec"
    # The reserve is 64 MiB, so nothing fits.
    script = f"mount -t tmpfs -o size=64m none {home.store} || exit 77; {localspec} pull tiny"
    command = ["unshare", "--mount", "--map-root-user", "sh", "-c", f"{script}; {localspec} stop"]
    if not shutil.which("unshare"):
        pytest.skip("only Linux can give us a small disk")
    run = subprocess.run(command, env=home.environment, capture_output=True, text=True)
    if run.returncode:
        pytest.skip("this machine does not let us mount a small disk")
    assert re.search(
        r"Not enough disk space: [\d.]+ [KMG]iB more are needed .* [\d.]+ \w+ are free", run.stderr
    )
    assert "Free some space (localspec gc) and pull again." in run.stderr


def test_a_record_of_a_newer_version_is_left_alone(home: PullingHome) -> None:
    use_scripted_engine(home)
    home.run("pull", "tiny")
    record = home.store / "pairs" / "tiny.json"
    newer = record.read_text().replace('"version": 1', '"version": 99')
    record.write_text(newer)
    for arguments in (
        ["list"],
        ["show", "tiny"],
        ["ask", "-m", "tiny", "hi"],
        ["rm", "-y", "tiny"],
        ["gc", "-y"],
    ):
        assert "written by a newer localspec" in home.run(*arguments).stderr
    assert "written by a newer localspec" in home.run("pull", "tiny").stderr
    assert record.read_text() == newer


def test_unknown_names_have_suggestions(home: PullingHome) -> None:
    use_scripted_engine(home)
    assert home.run("show", "tinny").stderr == (
        "localspec: There is no pair 'tinny'. Did you mean tiny or builtin? See: localspec list --all\n"
    )
    assert "Did you mean tiny?" in home.run("pull", "tinny").stderr
    assert "is part of the installation" in home.run("rm", "-y", "builtin").stderr
    assert home.run("rm", "-y", "coder-7b").stderr == (
        "localspec: The pair 'coder-7b' is not pulled yet; run: localspec pull coder-7b\n"
    )
    assert home.run("unload").stdout == "No pair is loaded.\n"


def test_local_files_are_used_in_place(home: PullingHome, tmp_path: Path) -> None:
    use_scripted_engine(home)
    target, draft = home.files
    run = home.run("add", "mine", "--target", target.name, "--draft", draft.name, cwd=tmp_path)
    assert run.stdout == 'mine is installed (966 KiB). Try: localspec ask -m mine "…"\n'
    assert home.run("ask", "-m", "mine", "say hello").stdout == "hello\n"
    home.run("unload")
    second_run = home.run("add", "mine", "--target", str(target))
    assert second_run.stderr == (
        "localspec: A pair 'mine' already exists; to replace it, add: --replace\n"
    )
    assert "it stands for the configured pair" in home.run("add", "default", "--target", "x").stderr
    assert "No such" not in home.run("add", "b", "--target", "gone.gguf").stderr
    home.run("rm", "-y", "mine")
    assert target.exists()


def test_a_replaced_local_file_is_used_and_reported_once(home: PullingHome, tmp_path: Path) -> None:
    use_scripted_engine(home)
    target, draft = home.files
    home.run("add", "mine", "--target", str(target), "--draft", str(draft))
    assert home.run("ask", "-m", "mine", "say x").stderr == ""
    home.run("unload")
    newer = write_pair(tmp_path / "newer", seed=5)[0]
    newer.replace(target)
    listed = home.run("list").stdout
    assert "mine: target.gguf has changed; it is read again when the pair is used." in listed
    run = home.run("ask", "-m", "mine", "say x")
    assert (run.stdout, run.stderr) == (
        "x\n",
        "localspec: target.gguf has changed since the pair was added or last used.\n",
    )
    assert home.run("ask", "-m", "mine", "say x").stderr == ""
    assert ": OK" in home.run("verify", "mine").stdout
    home.run("unload")
    write_pair(tmp_path / "newest", seed=6)[0].replace(target)
    with terminal(home.environment, "chat", "-m", "mine") as session:
        session.expect("›")
        session.send("say x\r")
        session.expect("target.gguf has changed")
        session.expect("›")
        session.send("\x04")
        assert session.wait() == 0
    target.unlink()
    (line,) = (
        output_line
        for output_line in home.run("list").stdout.splitlines()
        if "missing" in output_line
    )
    assert line.startswith("mine: target.gguf is missing (")
    assert line.endswith("Restore it, or remove the pair: localspec rm mine")


def test_several_pairs_are_removed_by_one_command(home: PullingHome) -> None:
    use_scripted_engine(home)
    for name in ("one", "two"):
        home.run("add", name, "--target", str(home.files[0]))
    run = home.run("rm", "-y", "one", "nothing", "two", "one")
    assert run.returncode == 1
    assert re.findall(r"^(Removed \w+|kept):?", run.stdout, re.M) == [
        *("Removed one", "kept", "Removed two", "kept")
    ]
    assert "There is no pair 'nothing'." in run.stderr
    assert home.run("list").stdout.count("\n") == 2  # the header and builtin


def test_drafts_on_this_disk_are_ranked_and_measured(home: PullingHome, tmp_path: Path) -> None:
    target, draft = home.files
    write_model(tmp_path / "alien.gguf", Shape(1, 64, 128, 4, 300), target_cycle(300))
    run = home.run("drafts", target.name, ".", cwd=tmp_path)
    assert re.search(rf"^{draft.name} .* [\d.]+× ", run.stdout, re.M)
    assert "To measure the speed-up of each: add --measure" in run.stdout
    assert "cannot use alien.gguf" in run.stdout
    run = home.run("drafts", str(target), str(tmp_path), "--measure")
    row = rf"^{draft.name} .* \d+% \(\d+% to \d+%\) +[\d.]+× \([\d.]+ to [\d.]+\)"
    assert re.search(row, run.stdout, re.M), run
    assert "The target alone: " in run.stdout
    assert home.status()["worker_pid"] is None  # Its memory has been freed.
    assert "There is no folder" in home.run("drafts", str(target), "/nowhere").stderr


@pytest.mark.slow
def test_drafts_are_ranked_by_their_acceptance(home: PullingHome, tmp_path: Path) -> None:
    """The load of the machine does not matter, because the acceptance of greedy text is fixed."""
    cycle = target_cycle(1024)
    shape = Shape(4, 128, 256, 4, 1024)
    write_model(tmp_path / "target.gguf", shape, cycle)
    for name, rate in (("b", 0.95), ("c", 0.6), ("a", 0.0)):
        cycle_with_errors = draft_cycle(cycle, rate)
        write_model(tmp_path / f"{name}.gguf", Shape(1, 64, 64, 4, 1024), cycle_with_errors, seed=2)
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as neighbour:
        try:
            arguments = (str(tmp_path / "target.gguf"), str(tmp_path), "--measure", "--json")
            run = home.run("drafts", *arguments, timeout=PATIENCE)
        finally:
            neighbour.kill()
    ranked = [draft for draft in json.loads(run.stdout)["drafts"] if draft["gain"]]
    assert [draft["name"] for draft in ranked] == ["b.gguf", "c.gguf", "a.gguf"]
    for draft, rate in zip(ranked, (0.95, 0.6, 0.0), strict=True):
        gain = draft["gain"]
        assert gain["acceptance_low"] - 0.1 <= rate <= gain["acceptance_high"] + 0.1


@pytest.mark.parametrize("speed_up", [0.8, 1.2])
def test_where_no_draft_pays_the_text_itself_drafts(
    speed_up: float, capsys: pytest.CaptureFixture[str]
) -> None:
    gain = DraftGain(0.3, 0.2, 0.4, speed_up, speed_up - 0.1, speed_up + 0.1, 1)
    draft = DraftView("a.gguf", "/a.gguf", "", 1 << 20, 9.0, matched=True, reason="", gain=gain)
    report = Drafts("/b.gguf", plain=10.0, drafts=[draft], file="/b.gguf", pair="b")
    drafts(msgspec.to_builtins(report))
    assert ("drafts come from the text itself" in capsys.readouterr().out) == (speed_up < 1)


@pytest.mark.slow
def test_heads_and_sidecars_are_measured_with_draft_models(
    home: PullingHome, tmp_path: Path
) -> None:
    """Acceptance is fixed by the files. Which of them is fastest depends on the machine."""
    folder, n_vocab = tmp_path / "models", TINY_HEADS.n_vocab
    folder.mkdir()
    target, cycle = folder / "target.gguf", target_cycle(n_vocab)
    write_heads(target, acceptance=0.9, architecture="qwen35")
    write_eagle(folder / "eagle3-target.gguf", TINY_HEADS, cycle, 0.5)
    write_eagle(folder / "eagle3-deep.gguf", TINY_HEADS, cycle, layers=(0, 1, 7))
    write_block(folder / "dflash-target.gguf", TINY_HEADS, cycle, 0.0)
    write_model(folder / "small.gguf", Shape(1, 16, 32, 1, n_vocab), draft_cycle(cycle, 0.8))
    listed = home.run("drafts", str(target), str(folder)).stdout
    rows = re.findall(
        r"^(its own MTP heads|\S+\.gguf) +(MTP heads|EAGLE-3|DFlash|model)", listed, re.M
    )
    assert [row[0] for row in rows] == [
        *("its own MTP heads", "dflash-target.gguf", "eagle3-target.gguf", "small.gguf")
    ]
    assert re.search(r"cannot use eagle3-deep.gguf .* the target has 2", listed)

    run = home.run("drafts", str(target), str(folder), "--measure", "--json")
    report = json.loads(run.stdout)
    gains = {draft["kind"]: draft["gain"] for draft in report["drafts"] if draft["gain"]}
    rates = {"mtp-embedded": 0.9, "eagle3": 0.5, "dflash": 0.0, "model": 0.8}
    assert gains.keys() == rates.keys(), report
    for kind, rate in rates.items():
        low, high = gains[kind]["acceptance_low"], gains[kind]["acceptance_high"]
        assert low - 0.1 <= rate <= high + 0.1, kind
    speed_ups = [draft["gain"]["speed_up"] for draft in report["drafts"] if draft["gain"]]
    assert speed_ups == sorted(speed_ups, reverse=True)
    assert home.status()["worker_pid"] is None


_WITNESS = """
import os, sys
def witness(event, args):
    if event == "socket.__new__" and args[1] not in (1, -1) or event == "socket.getaddrinfo":
        with open(os.environ["WITNESS"], "a") as file:
            print(sys.argv, event, args, file=file)
sys.addaudithook(witness)
"""


def check_offline(home: PullingHome, prefix: list[str]) -> None:
    """Run list, show and ask, and check that no process opened a network socket."""
    folder = home.root / "site"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(_WITNESS)
    witness = home.root / "witness"
    home.environment["PYTHONPATH"] = os.pathsep.join([str(folder), str(ROOT)])
    home.environment["WITNESS"] = str(witness)

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [*prefix, sys.executable, "-m", "localspec", *arguments]
        return subprocess.run(
            command, env=home.environment, stdin=subprocess.DEVNULL, capture_output=True, text=True
        )

    assert "tiny" in run("list").stdout
    assert "tokenizers  match" in run("show", "tiny").stdout
    assert run("ask", "-m", "tiny", "-n", "4", "hi").returncode == 0
    assert not witness.exists(), witness.read_text()


def test_with_hf_hub_offline_no_socket_is_opened(home: PullingHome) -> None:
    home.run("pull", "tiny")
    home.run("stop")
    request_count = len(home.hub.requests)
    home.environment["HF_HUB_OFFLINE"] = "1"
    check_offline(home, [])
    run = home.run("pull", "tiny")
    assert run.returncode == 1
    assert run.stderr == (
        "localspec: HF_HUB_OFFLINE is set, so nothing can be pulled; installed pairs still work.\n"
    )
    assert len(home.hub.requests) == request_count
    assert not (home.root / "witness").exists()


def test_commands_work_without_a_network(home: PullingHome) -> None:
    unshare = shutil.which("unshare")
    command = [unshare or "unshare", "--net", "--map-current-user"]
    if not unshare or subprocess.run([*command, "true"], capture_output=True).returncode:
        pytest.skip("this machine does not let us take the network away")
    home.run("pull", "tiny")
    home.run("stop")
    check_offline(home, command)  # The daemon starts without a network too.
