"""`scripts/bench api`: what the daemon makes of the engine, by its socket, beside llama-server.

Each part is a module with `NAME`, `add_options(parser)` and `measure(bench) -> Section`:

    conversation  how soon the next turn of a long conversation begins
    clients       1 to 8 clients at every acceptance: plain, fixed depth, `auto`
    prefill       prompt tokens per second
    gaps          a stream while a long prompt arrives
    editor        a recorded editing session, key by key
    ghost         from a key to the suggestion on the screen of a real editor
    reissue       an editor that drops a request at every keystroke

    shared   what the parts are given and give back; turns, percentiles, worst cells
    asking   what is sent to both, and several clients at once
    recorded that session
    command  the command line and the report
"""

from benchmarks.api.command import main as main
