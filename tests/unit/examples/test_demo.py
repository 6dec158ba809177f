"""What the demo decides before it starts anything."""

import pytest

from examples import demo

INTEL = "processor\t: 0\nflags\t\t: fpu avx2 avx512_bf16 amx_bf16\n"
OLD = "processor\t: 0\nflags\t\t: fpu avx avx2\n"
ARM = "processor\t: 0\nFeatures\t: fp asimd bf16\n"


@pytest.mark.parametrize(("cpuinfo", "expected"), [(INTEL, True), (OLD, False), (ARM, True)])
def test_bfloat16_instructions_are_read_from_the_processors_flags(cpuinfo: str, expected: bool) -> None:
    assert demo.has_bfloat16_instructions(cpuinfo) is expected


def test_a_slow_processor_gets_fewer_and_shorter_requests() -> None:
    example = demo.EXAMPLE_OF_MODEL["qwen"]
    whole, slow = example.read_prompts(), example.read_prompts(slow=True)
    assert (len(whole), whole[0].max_tokens) == (24, 96)
    assert [p.prompt for p in slow] == [p.prompt for p in whole[:6]]
    assert [p.max_tokens for p in slow] == [32] * 6


def test_too_little_memory_is_said_before_the_start() -> None:
    with pytest.raises(demo.DemoError, match="about 100000 GB of free memory are needed"):
        demo.check_memory(100_000)
    demo.check_memory(0)
