"""Measurements and load, for those who work on localspec; none of it is in the wheel.

A part of `scripts/bench` is a module with `main(arguments) -> int`:

    cli          a warm `localspec ask` beyond the engine's own time
    start        the daemon until it answers
    engine       plain, every fixed depth and `auto`, beside llama-server
    api/         what the daemon makes of the engine, by its socket
    tasks        a real model on tasks like people's, with drafts that are looked up
    gpu          `scripts/gpu_check`
    verdicts     `localspec bench` on pairs of which the truth is known
    agreement    `localspec bench` beside an engine in this process
    budget       several pairs under a budget of memory
    soak_daemon  `scripts/soak`

    measuring/   the engine in this process: settings in turns, texts, reports
    servers/     daemons and llama-servers of the benchmark's own
    texts/       those tasks, recorded answers, and the engine writing them again
    traces/      depth policies replayed on a recorded trace
    synthetic    pairs with a chosen acceptance rate, which the tests use too
    goals        a median beside its goal
    command      what the command lines share

It may import all of localspec; nothing of localspec may import it.
"""
