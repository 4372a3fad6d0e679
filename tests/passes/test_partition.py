"""Every clip once, in micro-batches of equal shape within the limits."""

from hypothesis import given
from hypothesis import strategies as st

from arachnec.cluster.file import parse_cluster
from arachnec.ir.nodes import Clip, Level, Module, Phase, Stage
from arachnec.ir.values import Attributes, Formula, Term
from arachnec.passes.partition import Partition, fitted_exponent

FLOPS = Formula((Term(1e-9, (("B", 1), ("S", 2))), Term(2e-5, (("B", 1), ("S", 1)))), "TFLOP")
OUTPUT = Formula((Term(1e-9, (("B", 1), ("S", 1))),), "GiB")
DIT = Stage("dit", True, Attributes.of(flops=FLOPS))
ENCODERS = (Stage("vae", False, Attributes.of(output=OUTPUT)), Stage("text", False, Attributes.of(output=OUTPUT)))


@st.composite
def modules(draw: st.DrawFn) -> Module:
    shapes = draw(
        st.lists(
            st.tuples(st.sampled_from((1, 17, 49, 81)), st.sampled_from((64, 480)), st.sampled_from((16, 77))),
            min_size=1,
            max_size=30,
        )
    )
    clips = tuple(
        Clip(index, frames, height, height, text, ((frames - 1) // 4 + 1) * (height // 16) ** 2)
        for index, (frames, height, text) in enumerate(shapes)
    )
    encoders = draw(st.sampled_from(((), ENCODERS)))
    return Module("m", Level.TRACED, parse_cluster(f"{draw(st.integers(1, 8))}:cpu"), clips, (*encoders, DIT))


policies = st.one_of(
    st.builds(Partition, policy=st.just("single")),
    st.builds(Partition, policy=st.just("equal-token"), tokens=st.integers(1, 40_000)),
    st.builds(Partition, tokens=st.none() | st.integers(1, 40_000), p=st.none() | st.just("1.8")),
)


@given(modules(), policies)
def test_every_clip_is_trained_exactly_once_with_clips_of_its_shape(module: Module, policy: Partition) -> None:
    partitioned = policy.run(module)
    clips = {clip.id: clip for clip in module.clips}
    trained = [clip for cascade in partitioned.cascades if cascade.phase is Phase.TRAIN for clip in cascade.clips]
    assert sorted(trained) == sorted(clips)
    for cascade in partitioned.cascades:
        members = [clips[clip] for clip in cascade.clips]
        assert len({(c.frames, c.height, c.width, c.text) for c in members}) == 1
        assert (cascade.batch, cascade.tokens, cascade.text) == (len(members), members[0].tokens, members[0].text)


@given(modules(), st.integers(1, 40_000))
def test_no_micro_batch_of_several_clips_exceeds_the_token_budget(module: Module, tokens: int) -> None:
    for cascade in Partition(policy="equal-token", tokens=tokens).run(module).cascades:
        assert cascade.batch == 1 or cascade.batch * cascade.tokens <= tokens


@given(modules())
def test_dual_keeps_every_micro_batch_within_the_work_of_the_longest_clip(module: Module) -> None:
    longest = max(clip.tokens for clip in module.clips)
    for cascade in Partition(p="1.8").run(module).cascades:
        assert cascade.batch * cascade.tokens**1.8 <= longest**1.8 * (1 + 1e-9)
        assert cascade.batch * cascade.tokens <= longest


@given(modules(), policies)
def test_a_train_cascade_reads_one_encode_of_every_encoder_of_the_same_clips(module: Module, policy: Partition) -> None:
    partitioned = policy.run(module)
    named = {cascade.name: cascade for cascade in partitioned.cascades}
    encoders = [stage.name for stage in module.stages if not stage.trained]
    for cascade in partitioned.cascades:
        inputs = [named[name] for name in cascade.inputs]
        if cascade.phase is Phase.TRAIN:
            assert [producer.stage for producer in inputs] == encoders
        assert all(producer.clips == cascade.clips for producer in inputs)


@given(modules(), policies)
def test_the_same_clips_give_the_same_micro_batches(module: Module, policy: Partition) -> None:
    assert policy.run(module) == policy.run(module)


def test_the_exponent_is_that_of_the_stages_flops() -> None:
    short, long = Clip(0, 1, 16, 16, 8, 1), Clip(1, 1, 16, 16, 8, 1_000_000_000)
    assert fitted_exponent(DIT, [short, Clip(1, 1, 16, 16, 8, 2)]) < 1.01
    assert 1.01 < fitted_exponent(DIT, [short, long]) < 2
    assert fitted_exponent(Stage("dit", True), [short, long]) == 2
