"""`python -m outbox_plugin` is `outbox`."""

from outbox_plugin.cli import main

main()
