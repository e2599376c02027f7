"""``python -m storesvc_client.cli`` is storectl, and so is the script of that name."""

import gc

from storesvc_client.cli import main


def run() -> None:
    """Runs storectl, and ends the process."""
    try:
        main(prog_name="storectl")
    finally:
        # The interpreter's last look for garbage would go through every module: a
        # tenth of what a short command takes, for memory that is given back anyway.
        gc.freeze()


if __name__ == "__main__":
    run()
