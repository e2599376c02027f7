"""``python -m storesvc_client.cli`` is storectl."""

from storesvc_client.cli import main

main(prog_name="storectl")
