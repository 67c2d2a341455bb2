"""`python -m localspec.engine --fd N`: started by the daemon with one end of a socketpair."""

import argparse

from localspec.engine import environment


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m localspec.engine")
    parser.add_argument("--fd", type=int, required=True, help="inherited socket to serve")
    arguments = parser.parse_args()
    environment.prepare()
    from localspec.engine.worker import main as serve

    serve(arguments.fd)


if __name__ == "__main__":
    main()
