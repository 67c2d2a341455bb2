"""Learn how a template writes calls, in a process of its own, for a pair that is not loaded.

The daemon starts it with the template on stdin, and reads the `CallFormat` as JSON on stdout.
"""

from __future__ import annotations

import sys

import msgspec

from localspec.chat.dialect import learn_calls
from localspec.engine.prompt.template_process import TemplateProcess


def main() -> None:
    """Write the notation of the template on stdin to stdout."""
    template, process = sys.stdin.buffer.read().decode(), TemplateProcess()
    try:
        form = learn_calls(template, lambda variables: process.render(template, variables))
    finally:
        process.close()
    sys.stdout.buffer.write(msgspec.json.encode(form))


if __name__ == "__main__":
    main()
