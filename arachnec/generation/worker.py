"""One rank of a run of requests: ``python -m arachnec.generation.worker FOLDER SAMPLER PROGRAM OUT DIGEST``, started
by ``arachnec generate`` and ``arachnec run``."""

from __future__ import annotations

from pathlib import Path

import click
import msgspec

from arachnec.generation.results import EXECUTED, Outcome, Results
from arachnec.launch.ending import exit_with
from arachnec.launch.ranks import joined_rank

PATH = click.Path(path_type=Path)


@click.command()
@click.argument("folder", type=PATH)
@click.argument("sampler", type=PATH)
@click.argument("program", type=PATH)
@click.argument("out", type=PATH)
@click.argument("digest")
@click.option("--stall-timeout", type=click.FloatRange(min=0, min_open=True), help="See `arachnec generate`.")
def command(folder: Path, sampler: Path, program: Path, out: Path, digest: str, stall_timeout: float | None) -> None:
    """Run this rank's part of PROGRAM, of the executable FOLDER, and write into OUT with the DIGEST of what latents
    follow from. Rank and world size come from torchrun's environment."""
    with joined_rank() as joined:
        from arachnec.data.switch import parse_switch
        from arachnec.executable.sampling_folder import read_sampling_executable
        from arachnec.generation.rank import GenerationRank
        from arachnec.generation.round_planning import planned_in_rounds
        from arachnec.ir.parser import parse_file
        from arachnec.ir.printer import print_module
        from arachnec.launch.phases import Timeouts
        from arachnec.models.sampler_file import load_sampler_file
        from arachnec.sampling.loop import Sampling

        executable, module = read_sampling_executable(folder), parse_file(program)
        settings = executable.header.settings
        assert module.cluster is not None
        device, _ = joined.meet(cpu=module.cluster.attrs.get("device") == "cpu", planned=module.cluster)
        joined.watchdog.enter("set-up")
        file = load_sampler_file(sampler, origin=settings.sampler)
        sampling = Sampling(file, settings.models, parse_switch(settings.switch), settings.restart)
        results = Results(out, settings, digest)

        def tell(outcome: Outcome) -> None:
            (program.parent / f"{outcome.id}.json").write_bytes(msgspec.json.encode(outcome))

        rank = GenerationRank(joined.rank, sampling, module, executable.requests, results, device, tell)
        with planned_in_rounds(joined.store, joined.rank, program, module) as rank.rounds:
            rank.connect()
            rank.enter = lambda progress: joined.watchdog.enter("the program of requests", progress=progress)
            rank.timeouts = Timeouts(stall=stall_timeout)
            rank.run()
        if rank.rounds and joined.rank == 0:
            program.with_name(EXECUTED).write_text(print_module(rank.module), encoding="utf-8")
        (program.parent / f"rank{joined.rank}.measured").write_bytes(msgspec.json.encode(rank.measured))


if __name__ == "__main__":
    exit_with(lambda: command.main(standalone_mode=False))
