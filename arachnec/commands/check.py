"""``arachnec check``: the proof before launch, of a program from anywhere."""

from __future__ import annotations

from pathlib import Path

import click


@click.command("check")
@click.argument("program", type=click.Path(path_type=Path))
@click.option("--equivalence", is_flag=True, help="Also execute it on small tensors, and compare with the reference.")
def command(program: Path, equivalence: bool) -> None:
    """Prove that PROGRAM, an executable folder or a lowered .cascade file, can run.

    Every clip reaches the gradient once with weight 1/N; no ranks wait for each other; every input is there before it
    is used; memory suffices at every moment. Exit code 2 and the reasons where one of these does not hold.

    With --equivalence all ranks run as processes here, on clips of a few tokens and a small model with as many layers:
    loss, gradients and weights are those of one process that takes clip after clip.
    """
    from arachnec.commands.program_file import demand_program

    demand_program(program)
    from arachnec.analysis.memory import high_water
    from arachnec.analysis.uses import Values
    from arachnec.cluster.topology import machines, node_of
    from arachnec.commands.program_file import read_program
    from arachnec.executable.folder import HEADER, read_executable, samples
    from arachnec.executable.program_input import demand_own_input, demand_own_requests
    from arachnec.executable.sampling_folder import read_sampling_executable
    from arachnec.ir.diagnostic import counted
    from arachnec.ir.sampling import is_sampling, outcomes_of
    from arachnec.passes.check import checked
    from arachnec.verification.memory import only_claimed

    module = checked(read_program(program))
    if equivalence and is_sampling(module):
        raise click.UsageError(f"--equivalence is of programs that train; {program} samples")
    unheld = ""
    if samples(program):
        from arachnec.generation.run import planned_stages

        executable = read_sampling_executable(program)
        unheld = ", ".join(executable.header.load)  # code, and looking at a folder runs none
        demand_own_requests(executable, module, None if unheld else planned_stages(executable))
    elif (program / HEADER).is_file():
        demand_own_input(read_executable(program), module, 0)
    assert module.cluster is not None
    values = Values(module)
    limits = [node.memory for node in machines(module.cluster)]
    peak, limit = max(
        ((high_water(values, listing), limits[node_of(module.cluster, listing.rank)]) for listing in module.programs),
        key=lambda pair: pair[0].total / pair[1],
    )
    once = f"gradient  {len(module.clips)} clips, each once in every trained stage, with weight 1/{len(module.clips)}"
    if is_sampling(module):
        outcomes = max((len(outcomes_of(clip)) for clip in module.clips), default=1)
        once = f"steps     {len(module.clips)} requests, each step once at each of up to {counted(outcomes, 'outcome')}"
    instructions = sum(len(listing.instructions) for listing in module.programs)
    click.echo(
        f"{module.name}: {instructions} instructions on {len(module.programs)} ranks hold all rules\n"
        f"  {once}\n"
        f"  deadlock  none, even where every send waits for its receive\n"
        f"  inputs    all there before they are used\n"
        f"  memory    at most {peak.total:.2f} of {limit:.2f} GiB, on rank {peak.rank}"
    )
    if believed := only_claimed(module):
        names = ", ".join(f"@{name}" for name in believed)
        click.echo(f"  claimed   what {names} take while they run is the program's word: no `saved` or `workspace`")
    if unheld:
        click.echo(f"  stages    not held to those that the passes in {unheld} plan with: `arachnec run` does that")
    if equivalence:
        from arachnec.equivalence.compare import demand_equivalent

        agreement = demand_equivalent(module)
        click.echo(f"  executed  {agreement.text}\n  by stage  {agreement.stages}")
