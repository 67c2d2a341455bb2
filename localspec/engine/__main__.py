"""`python -m localspec.engine --fd N`: started by the daemon with one end of a socketpair.

Or `--rpc-worker HOST PORT THREADS`: what `localspec rpc-worker` becomes, to hold layers for another machine.
"""

import argparse
import sys

from localspec.engine import environment


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m localspec.engine")
    for_one = parser.add_mutually_exclusive_group(required=True)
    for_one.add_argument("--fd", type=int, help="inherited socket to serve")
    for_one.add_argument("--rpc-worker", nargs=3, metavar=("HOST", "PORT", "THREADS"))
    arguments = parser.parse_args()
    environment.prepare()
    if arguments.rpc_worker:
        from localspec.engine.llama import rpc

        host, port, threads = arguments.rpc_worker
        sys.exit(rpc.main(host, int(port), int(threads)))
    from localspec.engine.worker import main as serve

    serve(arguments.fd)


if __name__ == "__main__":
    main()
