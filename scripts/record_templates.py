"""Record what transformers' own apply_chat_template makes of templates, for the tests to hold ours beside.

    python scripts/record_templates.py TEMPLATES_FOLDER RECORDING.json.gz

Run it with a Python that has transformers (no torch is needed) and jinja2; the project has not. A recording
holds, by template, its hash and, by chat, the text or that transformers refused it.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import importlib
import json
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
CHAT_TEMPLATES = "transformers.utils.chat_template_utils"
NOW = datetime(2026, 3, 1, 12, 30)  # what the tests' clock says too


class Clock(datetime):
    @classmethod
    def now(cls, tz: Any = None) -> Clock:
        return cls(NOW.year, NOW.month, NOW.day, NOW.hour, NOW.minute)


def rendered(tokenizer: Any, template: str, body: dict[str, Any]) -> dict[str, str]:
    """apply_chat_template's `text`, or why it `refused`.

    It leaves out what is null, and many templates then fail where a call has no text. So also the texts
    of its renderer alone: `null` with null kept, as older versions did, `empty` with "" for it.
    """
    texts: dict[str, str] = {}
    variables = dict(body.get("chat_template_kwargs", {}))
    more = {
        "tools": body.get("tools"),
        "documents": variables.pop("documents", None),
        "chat_template": template,
        "add_generation_prompt": body.get("add_generation_prompt", True),
        **variables,
    }
    try:
        texts["text"] = tokenizer.apply_chat_template(body["messages"], tokenize=False, **more)
    except Exception as error:  # a template fails in every way Python can
        texts["refused"] = f"{type(error).__name__}: {error}"[:200]
    if any(message["content"] is None for message in body["messages"]):
        render = importlib.import_module(CHAT_TEMPLATES).render_jinja_template
        for name, content in (("null", None), ("empty", "")):
            chat = [
                {**m, "content": content} if m["content"] is None else m for m in body["messages"]
            ]
            with contextlib.suppress(Exception):
                texts[name] = render([chat], **more, **tokenizer.special_tokens_map)[0][0]
    return texts


def recording(folder: Path) -> dict[str, Any]:
    transformers: Any = importlib.import_module("transformers")
    template_module: Any = importlib.import_module(CHAT_TEMPLATES)
    template_module.datetime = Clock
    chats = importlib.import_module("tests.support.chats").CHATS
    tokenizer = transformers.PreTrainedTokenizerBase(bos_token="<s>", eos_token="</s>")
    made: dict[str, Any] = {"transformers": transformers.__version__, "templates": {}}
    for file in sorted(folder.glob("*.jinja")):
        template = file.read_text(encoding="utf-8")
        made["templates"][file.stem] = {
            "sha256": hashlib.sha256(template.encode()).hexdigest(),
            "chats": {name: rendered(tokenizer, template, body) for name, body in chats.items()},
        }
    return made


def main() -> None:
    folder, into = map(Path, sys.argv[1:])
    text = json.dumps(recording(folder), ensure_ascii=False, sort_keys=True)
    into.write_bytes(gzip.compress(text.encode(), mtime=0))
    print(f"{into}: {into.stat().st_size} bytes")


if __name__ == "__main__":
    main()
