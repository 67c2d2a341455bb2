"""Learn how a template writes calls, in a process of its own, for a pair that is not loaded.

The daemon sends the template, and gets the `CallFormat` as JSON.
"""

from __future__ import annotations

import msgspec

from localspec.chat.dialect import learn_calls
from localspec.children import become_helper, receive_message, send_message
from localspec.engine.prompt.template_process import TemplateProcess


def main() -> None:
    """Answer the parent's template with its notation."""
    connection, process = become_helper(), TemplateProcess()
    template = receive_message(connection).decode()
    try:
        form = learn_calls(template, lambda variables: process.render(template, variables))
    finally:
        process.close()
    send_message(connection, msgspec.json.encode(form))


if __name__ == "__main__":
    main()
