"""`python -m localspec.engine --fd N`: started by the daemon with one end of a socketpair."""

import argparse
import os


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m localspec.engine")
    parser.add_argument("--fd", type=int, required=True, help="inherited socket to serve")
    arguments = parser.parse_args()
    # OpenMP threads that spin at a barrier collapse when anything else wants a core (measured: one
    # pass 0.2 ms → 460 ms beside a busy process, with this 3 ms). A short spin keeps the speed of a
    # quiet machine (27.8 ms against 27.7 at a gigabyte; sleeping at once costs 5 %). Read by the
    # library when it is loaded, so before the import below; the user's own setting stands.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    from localspec.engine.worker import main as serve

    serve(arguments.fd)


if __name__ == "__main__":
    main()
