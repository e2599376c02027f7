"""Runs one training process of the demo; `job_log` formats its output.

    python -m storesvc_client.demo.train --store 127.0.0.1:7070 --run demo/pydoc-lm \\
        --mesh dp=2,fsdp=2,tp=2 --steps 60 --save-every 10

As one of the processes of a job, it takes its number: ``--devices 2 --processes 4
--process 0 --coordinator 127.0.0.1:1234``.

JAX reads its devices from the environment when it is first imported, so `main` sets
that and only then imports what needs JAX.
"""

import argparse
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from storesvc.format.names import Which
from storesvc_client import connect
from storesvc_client.demo.job_log import Event, line

if TYPE_CHECKING:
    from storesvc_client.demo.training import Training


def main() -> None:
    """Trains with the options of the command line; prints one line for each event."""
    arguments = _arguments()
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = (
        f"--xla_force_host_platform_device_count={arguments.devices}"
        # compiles in two thirds of the time, and runs as fast
        " --xla_backend_optimization_level=1"
    )
    # hides the partitioner's advice on sharding; errors still show
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    _join_job(arguments)
    for event in _events(arguments):
        print(line(event), flush=True)


def _join_job(arguments: argparse.Namespace) -> None:
    if arguments.processes > 1:
        import jax

        jax.distributed.initialize(
            arguments.coordinator,
            arguments.processes,
            arguments.process,
            initialization_timeout=120,
        )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train the demo's model.")
    parser.add_argument("--mesh", type=_axes, required=True, metavar="AXIS=SIZE,...")
    parser.add_argument("--steps", type=int, required=True, help="last step")
    parser.add_argument("--devices", type=int, default=8, help="of this process")
    parser.add_argument("--processes", type=int, default=1, help="of the job")
    parser.add_argument("--process", type=int, default=0, help="which one this is")
    parser.add_argument("--coordinator", metavar="HOST:PORT", help="of the job")
    parser.add_argument("--store", metavar="HOST:PORT")
    parser.add_argument("--insecure", action="store_true", help="as connect takes it")
    for option in ("--ca", "--cert", "--key"):
        parser.add_argument(option, metavar="FILE", help="as connect takes it")
    parser.add_argument("--token-file", type=Path, metavar="FILE", help="its token")
    parser.add_argument("--run", metavar="NAMESPACE/RUN")
    parser.add_argument(
        "--save-every", type=int, metavar="STEPS", help="default: never save"
    )
    parser.add_argument(
        "--hold-after",
        type=int,
        metavar="STEP",
        help="wait to be killed, two steps after a save of that step or a later one",
    )
    parser.add_argument(
        "--resume", type=_which, metavar="CHECKPOINT", help="a step, or latest"
    )
    arguments = parser.parse_args()
    if arguments.processes > 1 and arguments.coordinator is None:
        parser.error("--processes needs --coordinator")
    stored = arguments.save_every is not None or arguments.resume is not None
    if stored and (arguments.store is None or arguments.run is None):
        parser.error("--save-every and --resume need --store and --run")
    if arguments.hold_after is not None and arguments.save_every is None:
        parser.error("--hold-after needs --save-every")
    return arguments


def _axes(text: str) -> dict[str, int]:
    return {
        name: int(size)
        for name, size in (axis.split("=", 1) for axis in text.split(","))
    }


def _which(text: str) -> Which:
    return "latest" if text == "latest" else int(text)


def _events(arguments: argparse.Namespace) -> Iterator[Event]:
    from storesvc_client.demo.training import Training

    training = Training(arguments.mesh)
    if arguments.store is None:
        return (s for _, s in training.steps(training.start(), until=arguments.steps))
    return _stored_events(arguments, training)


def _stored_events(
    arguments: argparse.Namespace, training: "Training"
) -> Iterator[Event]:
    from storesvc_client.demo.kill_point import stop_at_kill_point
    from storesvc_client.demo.training import saved

    with connect(
        arguments.store,
        ca=arguments.ca,
        cert=arguments.cert,
        key=arguments.key,
        token=arguments.token_file,
        insecure=arguments.insecure,
    ) as client:
        run = client.run(arguments.run)
        if arguments.resume is None:
            state = training.start()
        else:
            state, restored = training.resume(run, arguments.resume)
            yield restored
        steps = training.steps(state, until=arguments.steps)
        if arguments.save_every is None:
            yield from (step for _, step in steps)
            return
        events = saved(steps, run, every=arguments.save_every)
        if arguments.hold_after is None:
            yield from events
        else:
            yield from stop_at_kill_point(events, checkpoint=arguments.hold_after)


if __name__ == "__main__":
    main()
