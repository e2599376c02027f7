"""``storectl cat``: writes an item to stdout."""

import click

from storesvc_client._values.texts import count_text
from storesvc_client.cli.arguments import foreign_options, readable_item
from storesvc_client.cli.completion import Part, complete_path
from storesvc_client.cli.connection import Connection, pass_connection
from storesvc_client.cli.encoded_text import echo_data
from storesvc_client.cli.errors import Refusal
from storesvc_client.cli.foreign import ForeignOptions
from storesvc_client.cli.paths import LeafPath


@click.command()
@click.argument(
    "path",
    type=readable_item,
    metavar="PATH",
    shell_complete=complete_path(Part.LEAF, Part.LEAF, items=True),
)
@foreign_options
@pass_connection
def cat(connection: Connection, *, path: LeafPath, options: ForeignOptions) -> None:
    """Write an item of a checkpoint to stdout, byte for byte.

    PATH ends in the name of the item; of an item that each process of a job saved for
    itself, in NAME/PROCESS. JSON is written as it is stored, on one line. In a terminal
    a line feed is added, control characters are escaped, and bytes are rejected.

    \b
    Examples:
      storectl cat prod/llama-8b@latest:config | jq .layers
      storectl cat prod/llama-8b@latest:tokenizer >tokenizer.model
      storectl cat prod/llama-8b@500:data/3
    """
    name, slash, process = path.glob.partition("/")
    is_item = not slash or (process.isascii() and process.isdecimal())
    checkpoint = path.checkpoint
    with connection.open_for(path, options) as client:
        opened = client.run(checkpoint.run).open(checkpoint.which)
        items = opened.items
        if name not in items and path.glob in opened.leaves:
            raise Refusal(
                f"{path.glob!r} is a leaf of {opened.name}, no item; 'storectl get "
                f"{opened.name}:{path.glob}' reads it"
            )
        if not is_item:
            raise Refusal(
                f"{path.glob!r}: expected an item, NAME or NAME/PROCESS, such as data/3"
            )
        kind, count = items.info(name).kind, items.info(name).process_count
        if count is not None and not slash:
            raise Refusal(
                f"{path} has a value of each of {count_text(count, 'process')}; use "
                f"{path}/0 for that of process 0"
            )
        data = items.encoded(name, int(process) if slash else None)
    echo_data(str(path), kind, data)
