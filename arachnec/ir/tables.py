"""The attributes of every node, level by level: the contract between the passes.

Columns: name, type (``arachnec.ir.kinds``), first level at which it may appear, whether it must, meaning.
"""

from __future__ import annotations

from dataclasses import dataclass

from arachnec.ir.nodes import STAGE_OPS, Level


@dataclass(frozen=True)
class Row:
    name: str
    kind: str
    since: Level
    required: bool
    meaning: str


def table(text: str) -> dict[str, Row]:
    rows = {}
    for line in filter(str.strip, text.splitlines()):
        name, kind, since, need, meaning = (cell.strip() for cell in line.split("|"))
        rows[name] = Row(name, kind, Level[since.upper()], {"required": True, "optional": False}[need], meaning)
    return rows


MODULE = table("""
    makespan  | ms   | scheduled | required | end of the last cascade
    bound     | ms   | scheduled | required | no schedule has a shorter makespan, or less of the objective
    area_bound | ms | scheduled | optional | the part of it that needs no search: work over GPUs, or the longest chain
    grouping  | int > 0 | placed | optional | micro-batches that kfkb takes as one, where the links chose it
    objective | str  | scheduled | optional | of a latency, what the plan is for and its bound is of; else the makespan
    proved    | bool | scheduled | required | whether this makespan, or objective, is proved to be the least
    layout    | str  | traced | optional | how model state lies on the ranks, chosen once per run
    schedule  | str  | traced | optional | that of the pipeline, where the layout has stages
    full      | bool | traced | optional | micro-batches fill cells as if every block were recomputed
    tried     | [[str, ms]] | traced | optional | layouts that were simulated, and the iteration of each
    excluded  | [[str, ms]] | traced | optional | layouts that take so long at least, and were not simulated
    refused   | [str] | traced | optional | layouts in which some clip does not fit
    models    | [str] | traced | optional | stages that denoise, in the order in which they take over
    switch    | str   | traced | optional | the rule by which a request goes over from the first of them
    decoder   | str   | traced | optional | the stage that makes videos of latents
    round     | ms    | placed | optional | after about so long the rest of the requests is planned again
    rounds    | int > 0 | placed | optional | a makespan has at most so many of them, longer ones where it grows
""")

CLUSTER = table("""
    nodes         | int     | traced | required | machines
    gpus          | int     | traced | required | devices per machine
    device        | str     | traced | required | its name in the device specs
    memory        | GiB     | traced | required | of one device, the smallest
    flops         | TFLOP/s > 0 | traced | required | sustained by one device in the model's dtype, the fastest
    intra         | GB/s > 0 | traced | required | between devices of a machine, one direction, the slowest
    inter         | GB/s > 0 | traced | required | between machines, per NIC (without `nics` one a node), one direction
    latency       | us      | traced | required | of a message inside a machine
    inter_latency | us      | traced | required | of a message between machines
    nics          | str     | traced | optional | the network card of each device of a machine, one letter each
    cores         | int > 0 | traced | optional | processor cores of a machine
    all_reduce    | GB/s > 0 | traced | optional | gradients all-reduced within a machine, measured; else `intra`
    collectives   | [[str, us, GB/s > 0]] | traced | optional | of cells, and handoffs, within a machine; else `intra`
    host          | GB/s > 0 | traced | optional | shared by a machine's devices, where they have no links
    host_link     | GB/s > 0 | traced | optional | between machines' hosts, one a machine: what encoders hand over
    host_memory   | GiB     | traced | optional | of a machine's host, shared by its devices, for what they keep there
    pcie          | GB/s > 0 | traced | optional | between a device and its host, one direction
    rack          | int     | traced | optional | machines behind one uplink, in the order of their numbers
    uplink        | GB/s > 0 | traced | optional | from a rack to the others, shared by its machines, one direction
    measured      | [[int, int, GB/s > 0]] | traced | optional | handoffs between two ranks as a run measured them
    slowed        | [[int, float > 0]] | traced | optional | ranks that a run found slow, and how many times slower
    mixed | [[int > 0, str, GiB, TFLOP/s > 0, GB/s > 0]] | traced | optional | what the machines are, kind by kind
""")

CLIP = table("""
    name      | str | traced | optional | what the manifest calls it
    iteration | int | traced | optional | the global batch it belongs to, where a module holds several
    steps     | int | traced | optional | of a request: its sampling steps
    branches  | [int] | traced | optional | of a request: predictions of one step of each model; absent = 1
    window    | [int] | traced | optional | of a request: the least and most steps that the first model takes
    forecast  | int | traced | optional | of a request: so many it is planned to take
    arrival   | ms  | traced | optional | of a request: when it is there; absent = from the start
""")

STAGE = table("""
    source          | str            | traced | optional | the class it came from
    params          | int            | traced | optional | number of parameters
    dtype           | str            | traced | optional | of the parameters
    trained         | int            | traced | optional | how many of them train; absent = all
    blocks          | [[@graph, int > 0]] | traced | optional | its block classes and how often each is repeated
    layers          | [[str, int]]   | traced | optional | path of each block, as they run, and its trained parameters
    hidden          | int > 0        | traced | optional | width of a token
    heads           | int > 0        | traced | optional | of its attentions, the least
    attentions      | int            | traced | optional | self-attention calls in one forward
    joint           | bool           | traced | optional | whether text tokens take part in attention
    captioned       | bool           | traced | optional | whether captions are among the tokens S; absent = no
    flops           | TFLOP formula  | traced | optional | one forward
    saved           | GiB formula    | traced | optional | kept for the backward, nothing recomputed
    saved_recompute | GiB formula    | traced | optional | kept for the backward, every block recomputed
    spared          | [[int, GiB formula]] | traced | optional | layers that save alike if recomputed; absent = all do
    recomputing     | GiB formula    | traced | optional | the part of that for the block that is run again, not kept
    shell           | GiB formula    | traced | optional | the part of these outside the blocks, whole on every rank
    head            | [GiB formula]  | traced | optional | behind the last block: kept of the shell, and alive there
    workspace       | GiB formula    | traced | optional | needed while it runs, beyond what is kept
    batch           | GiB formula    | traced | optional | what a forward is given on its device: arguments and target
    traffic         | GiB formula    | traced | optional | q, k, v and output of all attentions of one forward
    state           | GiB            | traced | optional | on every rank: parameters, gradients, optimizer
    optimizer       | GiB            | traced | optional | the part of the whole state that can lie on one rank alone
    tensors         | [[int, str, int, int > 0, bool, int, int]] | traced | optional | of each kind of layer, see below
    tensor_kinds    | [int]          | traced | optional | the kind of each layer
    outside         | [[int, [int], [int], str, int, int > 0, bool, int, int]] | traced | optional | as `tensors`
    unsharded       | int            | traced | optional | bytes on every rank that holds any of it: buffers
    sharded         | int > 0        | traced | optional | the optimizer's part is dealt out over so many ranks
    cell            | int > 0        | traced | optional | parameters, gradients, optimizer are dealt out over so many
    host            | [str]          | traced | optional | what lies in host memory: "optimizer", "parameters", "inputs"
    host_state      | GiB            | traced | optional | of parameters, gradients, optimizer in its host, per rank
    host_inputs     | GiB formula    | traced | optional | inputs of all blocks, in host memory if they run again
    gradients       | str            | traced | optional | precision of the gradients; absent = the parameters'
    degrees         | [int > 0]      | traced | optional | legal degrees; absent = any
    most_clips      | int > 0        | traced | optional | clips of a micro-batch at most; absent = any number
    graphs          | str            | traced | optional | "shapes": one a clip shape, "none"; absent = one for all
    timed           | [[int, int, int, int, ms]] | costed | optional | profiled steps: ranks, predictions, S, T, ms
    output          | GiB formula    | traced | optional | what it hands off
    output_tokens   | GiB formula    | traced | optional | of that, what ranks divide that share its tokens
    divides         | int > 0        | traced | optional | of an encoder: the most ranks for one clip; absent = 1
    undivided       | float          | traced | optional | the part of a clip's time that all of its ranks take
    held            | GiB formula    | traced | optional | the part of the workspace that all of a clip's ranks need
    halo            | GiB formula    | traced | optional | what each of a clip's ranks sends; trained: tokens dealt anew
    exchanges       | int            | traced | optional | how often, at most
    tensor_split    | GiB            | traced | optional | of an encoder's state, what ranks can divide by width
    tensor_units    | int > 0        | traced | optional | the most ranks that can
    tensor_whole    | str            | traced | optional | why none can
    tensor_parallel | int > 0        | traced | optional | ranks of a cell that divide its weights; absent = whole
    part_of         | str            | traced | optional | the stage of which it runs some of the blocks
    tied            | [[[int], int]] | traced | optional | parts that read the same parameters, and how many train
    place           | [int]          | traced | optional | its ranks, where a planner of stages chose them
    classes         | [int]          | traced | optional | block class of each layer, by its place in `blocks`
    layer_params    | [int]          | traced | optional | parameters of each layer
    block_flops     | [TFLOP formula] | traced | optional | one forward of a block, class by class
    block_saved     | [GiB formula]  | traced | optional | kept for the backward by a block, class by class
    block_inputs    | [GiB formula]  | traced | optional | of that its inputs, kept if it is recomputed
    block_shared    | [GiB formula]  | traced | optional | inputs that all blocks read, kept once
    block_workspace | [GiB formula]  | traced | optional | needed while it runs, beyond what is kept
    block_traffic   | [GiB formula]  | traced | optional | q, k, v and output of its attentions
    block_attentions | [int]         | traced | optional | its self-attention calls
    block_heads     | [int > 0]      | traced | optional | of its attentions, the least
    end_params      | [[int, int]]   | traced | optional | embedding, then head: parameters, and how many train
    end_flops       | [TFLOP formula] | traced | optional | one forward of the embedding, and of the head
    end_saved       | [GiB formula]  | traced | optional | kept for the backward by them
    cuts            | [[int, GiB formula]] | traced | optional | runs of layers, and what each of them hands on
    token_cuts      | [[int, GiB formula]] | traced | optional | of `cuts`, what blocks make of tokens
    tied_layers     | [[[int], int]] | traced | optional | layers that read the same parameters, and how many train
    between_params  | [[[int], int, int]] | traced | optional | layers, what they alone read in no block, what trains
    between_flops   | [[int, TFLOP formula]] | traced | optional | layers, one forward of what runs behind them
    between_saved   | [[int, GiB formula]] | traced | optional | layers, what that keeps for the backward
    uncut           | str            | traced | optional | why the model cannot be cut
    density         | [[[int], float, [float], int?]] | traced | optional | layers, share, by head; class of length
    measured        | [[[int], float, [float], int?]] | traced | optional | as `density`, where a run made it sparse
    learned         | [[[int], float, [float], int?]] | traced | optional | as `density`, of layers ready to sample
    dense           | [[str, str]]   | traced | optional | attentions that attend to all keys, and why
    query_group     | int            | traced | optional | queries whose keys are chosen together, at most
    key_block       | int            | traced | optional | keys that are chosen together, at most
    caption_tokens  | [int]          | traced | optional | joined to a clip's: for each text token, and beside these
    mass            | float          | traced | optional | of a query's attention that the chosen keys hold
    predictor_rank  | int            | traced | optional | features by which keys are predicted, of each head
    division        | str            | traced | optional | over ranks: "groups" cuts heads, "heads" does not
    choice          | TFLOP formula  | traced | optional | predicting and choosing keys, one layer forward
    choice_overhead | ms             | traced | optional | of that, what no size of the clip changes
    sparse_speed    | [float]        | traced | optional | over dense kernels: attention forward, backward, and choice
    learning        | TFLOP formula  | traced | optional | predictors, one layer: dense attention that takes as long
    learning_overhead | ms           | traced | optional | beside that, what no size of the clip changes
    predictors      | int            | traced | optional | parameters that predict which keys matter
    forward         | ms formula     | costed | optional | time at degree 1; the constant is not divided by the degree
    backward        | ms formula     | costed | optional | the same, of a trained stage
    activation      | ms formula     | costed | optional | of a split backward the part before its `weight`, measured
    weight          | ms formula     | costed | optional | of a split backward the products with weights, measured
    update          | ms             | costed | optional | the optimizer's step, measured
    costs           | str            | costed | required | where from: "profile" and its file, "device specs" or "table"
""")

FUSED = table("""
    schedule        | str         | traced | required | "row", "column" or "loop": what one program works on
    rows            | str         | traced | optional | how many of them there are
    kernel          | str         | traced | required | the hand-written kernel that does it, or "generated"
    bytes_before    | GiB formula | traced | required | read and written when every operation runs alone, forward
    bytes_after     | GiB formula | traced | required | read and written by the region
    backward_before | GiB formula | traced | optional | read and written by the backward of every operation alone
    backward_after  | GiB formula | traced | optional | read and written by the region's backward in one pass
    kept_before     | GiB formula | traced | optional | kept for the backward by the operations
    kept_after      | GiB formula | traced | optional | kept for the backward by the region: its inputs
    launches_before | int         | traced | required | kernels, forward
    launches_after  | int         | traced | required | kernels of the region
    registers       | int         | traced | optional | KiB that one program holds at its widest
    stopped         | [str]       | traced | optional | why the region did not grow, one reason for each neighbour
""")

CASCADE = table("""
    times     | [[int > 0, ms]] | costed    | optional | time at each legal degree, instead of the stage's formulas
    per_clip  | ms          | costed    | optional | measured time of each of an encoder's clips, instead of its formula
    sparse    | [int]       | costed    | optional | layers that attend to chosen keys; the others attend to all
    steps     | [int]       | partitioned | optional | of a denoise: its first and last sampling step, from 0
    branches  | int         | partitioned | optional | of a denoise: predictions of one step; absent = 1
    switch    | str         | partitioned | optional | the rule that decides which of its steps it takes; absent = all
    planned   | int         | partitioned | optional | so many of its steps it takes by the forecast; absent = all
    degree    | int         | scheduled | required | ranks that share it
    side      | int         | scheduled | optional | clips, or branches of a denoise, side by side; absent = 1
    unconditional | [int]   | scheduled | optional | its branch's [ulysses, ring]; absent = as the conditional one
    start     | ms          | scheduled | required | from the start of the iteration
    end       | ms          | scheduled | required | from the start of the iteration
    recompute | any int or bool | scheduled | optional | first blocks that run again in the backward; `true` = all
    memory    | GiB         | scheduled | optional | per rank, held while it runs
    round     | int         | placed    | optional | before the rest is planned again so many times; absent = 0
    assigned  | [int]       | scheduled | optional | the ranks that the schedule chose already
    ranks     | [int]       | placed    | required | one for each of its degree
    ulysses   | int         | placed    | optional | heads are split over so many ranks
    ring      | int         | placed    | optional | keys and values go round so many; ulysses x ring = degree
    shards    | [int]       | placed    | optional | tokens per rank; absent = as even as possible, larger first
    attention | str         | placed    | optional | kernel family of its attention; absent = the run chooses
    groups    | int         | placed    | optional | query groups of its clip, by which `heads` divides
    heads     | [[[int], [any int], [int]]] | placed | optional | layers, place of each head (-1: cut), parts of these
""")

REDUCE = table("""
    ranks | [int] | scheduled | optional | who takes part
    bytes | int   | scheduled | optional | of the gradients
    time  | ms    | scheduled | optional | planned duration
    buckets | [int] | placed  | optional | layers of each bucket, from the last; the last bucket takes the rest too
""")

STEP = table("""
    time  | ms    | scheduled | optional | planned duration
    ranks | [int] | scheduled | optional | who takes part
""")

PROGRAM = table("""
    state | GiB | lowered | required | parameters, gradients, optimizer state on this rank
    host_state | GiB | lowered | optional | the same, in its host's memory
""")

_RUN = """
    time      | ms    | lowered | required | planned duration
    start     | ms    | lowered | required | planned start
"""

# Of a stage whose parameters are dealt out. A backward reads its lists from the end.
_CELL = """
    cell      | [int] | lowered | optional | the ranks that hold this rank's parameters with it
    gather    | [int] | lowered | optional | layers that become whole, in this order
    release   | [int] | lowered | optional | layers that are whole no longer, each after its use
    held      | int   | lowered | optional | layers that are whole at once, beside the last one
    place     | str   | lowered | optional | "host": layers come from host memory, their gradients go there
"""

_HOST = """
    from_host | int   | lowered | optional | bytes that come from host memory
    to_host   | int   | lowered | optional | bytes that go to host memory
"""

INSTRUCTION = {
    "encode": table(
        _RUN
        + """
    memory    | GiB   | lowered | optional | its output, held until `free`
    workspace | GiB   | lowered | optional | needed while it runs, beyond what is kept
"""
    ),
    "forward": table(
        _RUN
        + """
    memory    | GiB   | lowered | optional | held until its backward
    weight    | float | lowered | optional | share of the loss: clips of the cascade / clips of the global batch
    workspace | GiB   | lowered | optional | needed while it runs, beyond what is kept
    ulysses   | int   | lowered | optional | as on the cascade
    ring      | int   | lowered | optional | as on the cascade
    shards    | [int] | lowered | optional | as on the cascade
    recompute | any int or bool | lowered | optional | as on the cascade
    attention | str   | lowered | optional | as on the cascade
    side      | int   | lowered | optional | as on the cascade
    offload   | [int] | lowered | optional | blocks whose inputs go to host memory until they run again
    host      | GiB   | lowered | optional | of these inputs, until the backward has ended
"""
        + _HOST
        + _CELL
    ),
    "backward": table(
        _RUN
        + """
    workspace | GiB   | lowered | optional | needed while it runs, beyond what is kept
    reload    | [int] | lowered | optional | blocks whose inputs come back from host memory
"""
        + _HOST
        + _CELL
        + """
    scatter   | [int] | lowered | optional | layers whose gradients are reduce-scattered over the cell
"""
    ),
    "weight": table(
        _RUN
        + """
    workspace | GiB   | lowered | optional | needed while it runs, beyond what is kept
    cell      | [int] | lowered | optional | the ranks that hold this rank's parameters with it
    scatter   | [int] | lowered | optional | layers whose gradients are reduce-scattered over the cell
    place     | str   | lowered | optional | "host": their gradients go to host memory
"""
        + _HOST
    ),
    "denoise": table(
        _RUN
        + """
    memory    | GiB   | lowered | optional | its output, held until `free`
    workspace | GiB   | lowered | optional | needed while it runs, beyond what is kept
    steps     | [int] | lowered | optional | as on the cascade
    branches  | int   | lowered | optional | as on the cascade
    unconditional | [int] | lowered | optional | as on the cascade
    switch    | str   | lowered | optional | as on the cascade
    ulysses   | int   | lowered | optional | as on the cascade
    ring      | int   | lowered | optional | as on the cascade
    shards    | [int] | lowered | optional | as on the cascade
    side      | int   | lowered | optional | as on the cascade
    attention | str   | lowered | optional | as on the cascade
"""
    ),
    "decode": table(
        _RUN
        + """
    memory    | GiB   | lowered | optional | its output, held until `free`
    workspace | GiB   | lowered | optional | needed while it runs, beyond what is kept
"""
    ),
    "send": table("""
    bytes     | int   | lowered | required | of the message
"""),
    "receive": table("""
    bytes     | int   | lowered | required | of the message
    memory    | GiB   | lowered | optional | held until `free`
"""),
    "gather": table("""
    layers    | [int] | lowered | required | whose updated parameters become whole, in this order
    bytes     | int   | lowered | required | of these parameters
    time      | ms    | lowered | required | planned duration of all, one after another
"""),
    "reduce": table(
        """
    bytes     | int   | lowered | required | of the gradients
    time      | ms    | lowered | required | planned duration
    layers    | [int] | lowered | optional | the bucket's layers, by number; absent with `rest` = the whole stage
    rest      | bool  | lowered | optional | the bucket holds what lies in no layer, or in several
    early     | ms    | lowered | optional | starts inside the last backward, so long before its end
    cell      | [int] | lowered | optional | the gradients are this rank's shards in its cell
    tied      | [int] | lowered | optional | of what these parts of a model all read, over the ranks of all
"""
        + _HOST
    ),
    "norm": table("""
    time      | ms    | lowered | required | planned duration
"""),
    "step": table(
        """
    time      | ms    | lowered | required | planned duration
"""
        + _HOST
    ),
    "learn": table("""
    bytes     | int   | lowered | required | of the gradients of all predictors
    time      | ms    | lowered | required | planned duration
"""),
    "replan": table("""
    round     | int   | lowered | required | from here on what follows may be planned again: this round and later ones
"""),
    "free": {},
}
# Of a cascade's instructions those that are written alike, ``word %cascade on [ranks]``; and of a stage's.
CASCADE_WORDS = tuple(op for op in INSTRUCTION if op not in ("send", "receive", *STAGE_OPS))
STAGE_WORDS = tuple(op for op in STAGE_OPS if op not in ("reduce", "step"))  # which stand outside programs, too

# What `trace` says of the parts of a stage, for cutting it. A plan does not repeat it.
FIGURES = (
    "classes", "layer_params", "block_flops", "block_saved", "block_inputs", "block_shared", "block_workspace",
    "block_traffic", "block_attentions", "block_heads", "end_params", "end_flops", "end_saved", "cuts",
)  # fmt: skip
# How a sparse stage chooses keys. Its parts choose alike.
CHOICE = (
    "query_group", "key_block", "caption_tokens", "mass", "predictor_rank", "division", "choice", "choice_overhead",
    "sparse_speed", "learning", "learning_overhead",
)  # fmt: skip
TIED = "tied_layers"  # where layers share parameters, one more
BETWEEN = "between_params"  # and where parameters in no block are read by neither the first nor the last
BETWEEN_COSTS = ("between_flops", "between_saved")  # and where something runs between blocks
TOKEN_CUTS = "token_cuts"  # where blocks hand on tokens, one more
UNCUT = "uncut"  # and where there are none of these, why
OF_PARTS = (*FIGURES, TIED, BETWEEN, *BETWEEN_COSTS, TOKEN_CUTS, UNCUT)

# Speeds of a cluster's links and ranks, which a profile and a run measure. They price a plan; no proof rests on them.
LINK_SPEEDS = (
    "intra", "inter", "latency", "inter_latency", "all_reduce", "collectives", "host", "host_link", "pcie", "measured",
    "slowed",
)  # fmt: skip
