"""The entry point of a worker: `python -m localspec.engine --fd N`.

The daemon starts it with one end of a socketpair. With `--rpc-worker HOST PORT THREADS` it is what
`localspec rpc-worker` becomes, to hold layers for another machine.
"""

import argparse
import sys

from localspec.engine import environment, rpc_entrance
from localspec.engine.prompt import template_process


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m localspec.engine")
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--fd", type=int, help="inherited socket to serve")
    mode.add_argument("--rpc-worker", nargs=3, metavar=("HOST", "PORT", "THREADS"))
    # Tests run their worker on the processor: RPC does not report which operations a device has, and
    # llama.cpp ends the process if one is missing.
    parser.add_argument("--device", choices=("any", "cpu"), default="any")
    arguments = parser.parse_args()
    environment.prepare()
    if arguments.rpc_worker:
        host, port, threads = arguments.rpc_worker
        # Moving to another network comes first: the libraries start threads, and then it is impossible.
        entrance = rpc_entrance.open_entrance(host, int(port))
        from localspec.engine.llama import rpc

        sys.exit(rpc.main(host, int(port), int(threads), entrance, arguments.device))
    template_process.start_spare_child()
    from localspec.engine.worker import main as serve

    serve(arguments.fd)


if __name__ == "__main__":
    main()
