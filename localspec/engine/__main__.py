"""`python -m localspec.engine --fd N`: started by the daemon with one end of a socketpair.

Or `--rpc-worker HOST PORT THREADS`: what `localspec rpc-worker` becomes, to hold layers for another machine.
"""

import argparse
import sys

from localspec.engine import environment, rpc_entrance


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m localspec.engine")
    for_one = parser.add_mutually_exclusive_group(required=True)
    for_one.add_argument("--fd", type=int, help="inherited socket to serve")
    for_one.add_argument("--rpc-worker", nargs=3, metavar=("HOST", "PORT", "THREADS"))
    # A worker of tests is on the processor: RPC tells nobody which operations its device has, and
    # llama.cpp ends the process of one that has not.
    parser.add_argument("--device", choices=("any", "cpu"), default="any")
    arguments = parser.parse_args()
    environment.prepare()
    if arguments.rpc_worker:
        host, port, threads = arguments.rpc_worker
        # The libraries start threads, and a process with threads cannot move to another network.
        entrance = rpc_entrance.open_entrance(host, int(port))
        from localspec.engine.llama import rpc

        sys.exit(rpc.main(host, int(port), int(threads), entrance, arguments.device))
    from localspec.engine.worker import main as serve

    serve(arguments.fd)


if __name__ == "__main__":
    main()
