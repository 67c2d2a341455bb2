"""One click command per module, each named `command`; `app.COMMANDS` lists them."""
