"""Every LayerNorm source compiles for every architecture, without a GPU and without spilling."""

from __future__ import annotations

import struct

import pytest
import torch

from hfai.kernels import jit
from hfai.kernels.layer_norm import plan, programs
from tests.kernels.compiled import DEVICES, Resources, resources

pytest.importorskip("cuda.core", reason="needs cuda-core and NVRTC, which are for Linux")

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
ALL = {"ALIGNED": True, "CENTERED": True, "HAS_WEIGHT": True}
REGISTERS = 65_536  # of a multiprocessor, on all of these architectures
# Rows of 200 003 elements, loaded one at a time: 49 of them a thread in a block of 1024 need a few
# registers more than there are. Twice the blocks spill nothing and are slower.
MOST_SPILLED_BY_ODD_LONG_ROWS = 192
# For sm_100 the compiler stops at 96 registers a thread in one layout and spills two; with a bound
# that gives it more, sm_90 takes more too, and is slower.
MOST_SPILLED = {("sm_100", 8192, torch.bfloat16): 8}


def check(found: dict[str, Resources], threads: int, spilled: int = 0) -> None:
    for name, kernel in found.items():
        assert name.startswith("hfai_layer_norm_")
        assert kernel.spilled <= spilled, f"{name} spills {kernel.spilled} bytes"
        assert kernel.stack <= spilled, f"{name} keeps {kernel.stack} bytes in memory"
        assert kernel.registers * threads <= REGISTERS, name


@pytest.mark.parametrize("architecture", DEVICES)
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    "length", [7, 40, 768, 1001, 1024, 8192, 32_768, 65_536, 131_072, 200_003, 262_144]
)
@pytest.mark.parametrize("few_rows", [False, True], ids=["", "few-rows"])
def test_forward(architecture: str, dtype: torch.dtype, length: int, few_rows: bool) -> None:
    size = dtype.itemsize
    layout = plan.forward_plan(length, size, size, DEVICES[architecture], few_rows)
    if layout is None:
        return  # test_long_rows has it
    constants = ALL | {"ROW_LENGTH": length, "HAS_BIAS": True} | layout.constants()
    text = jit.program_text(programs.FORWARD, constants, {"X": dtype, "Y": dtype, "W": dtype})
    spilled = MOST_SPILLED.get((architecture, length, dtype), 0)
    if length == 200_003:
        spilled = MOST_SPILLED_BY_ODD_LONG_ROWS
    check(resources(text, architecture), layout.threads, spilled)


@pytest.mark.parametrize("architecture", DEVICES)
@pytest.mark.parametrize("few_rows", [False, True], ids=["", "few-rows"])
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("length", [7, 40, 768, 1024, 4096, 8192, 65_536])
def test_backward(architecture: str, dtype: torch.dtype, length: int, few_rows: bool) -> None:
    limits, size = DEVICES[architecture], dtype.itemsize
    layout = plan.backward_plan(length, size, size, size, limits, True, few_rows)
    if layout is None:
        return  # test_long_rows has it
    constants = ALL | {"ROW_LENGTH": length, "FEW_ROWS": few_rows} | layout.constants()
    constants |= {"NEED_DX": True, "NEED_DWEIGHT": True, "NEED_DBIAS": True, "STRIPS": 1}
    text = jit.program_text(programs.BACKWARD, constants, {"X": dtype, "Y": dtype, "W": dtype})
    found = resources(text, architecture)
    check(found, layout.threads)
    static = found["hfai_layer_norm_backward"].shared
    dynamic = layout.shared_bytes(length, size, size, size)
    assert static + dynamic <= limits.shared_bytes_per_block


@pytest.mark.parametrize("architecture", DEVICES)
@pytest.mark.parametrize("dtype", [FP32, FP16], ids=["fp32", "fp16"])
@pytest.mark.parametrize("length", [1_000_000, 1_000_003])
def test_long_rows(architecture: str, dtype: torch.dtype, length: int) -> None:
    vector = plan.vector_length(length, dtype.itemsize)
    constants = ALL | {"ROW_LENGTH": length, "HAS_BIAS": True, "VECTOR": vector}
    constants |= {"NEED_DWEIGHT": True, "NEED_DBIAS": True, "THREADS": plan.LONG_ROW_THREADS}
    constants |= {"STRIPS": plan.strips(vector)}
    text = jit.program_text(programs.LONG_ROWS, constants, {"X": dtype, "Y": dtype, "W": FP32})
    check(resources(text, architecture), plan.LONG_ROW_THREADS)


@pytest.mark.parametrize("architecture", DEVICES)
def test_mixed_types_rms_and_partial_gradients(architecture: str) -> None:
    limits = DEVICES[architecture]
    types = {"X": BF16, "Y": FP32, "W": FP32}
    layout = plan.backward_plan(1000, 2, 4, 4, limits)
    assert layout is not None
    for centered, dx, dweight, dbias in [
        (True, False, True, True),
        (True, True, False, False),
        (True, False, False, True),
        (False, True, True, False),
    ]:
        constants = {"ROW_LENGTH": 1000, "ALIGNED": False, "CENTERED": centered}
        constants |= {"HAS_WEIGHT": True, "FEW_ROWS": False, "STRIPS": 1} | layout.constants()
        constants |= {"NEED_DX": dx, "NEED_DWEIGHT": dweight, "NEED_DBIAS": dbias}
        check(
            resources(jit.program_text(programs.BACKWARD, constants, types), architecture),
            layout.threads,
        )


@pytest.mark.parametrize("architecture", DEVICES)
@pytest.mark.parametrize("dtype", [FP32, FP16, BF16], ids=["fp32", "fp16", "bf16"])
def test_adding_partial_sums(architecture: str, dtype: torch.dtype) -> None:
    constants = {"THREADS": programs.ADD_PARTIALS_THREADS}
    text = jit.program_text(programs.ADD_PARTIALS, constants, {"W": dtype})
    check(resources(text, architecture), programs.ADD_PARTIALS_THREADS)


def _machine_code(text: str, architecture: str, fma: bool) -> dict[str, bytes]:
    """Return each kernel's instructions, from the binary's ELF sections."""
    from cuda.core import Program, ProgramOptions

    options = ProgramOptions(name="hfai", arch=architecture, std="c++17", fma=fma)
    code = bytes(Program(text, "c++", options=options).compile("cubin").code)
    (at,) = struct.unpack_from("<Q", code, 0x28)
    size, count, names = struct.unpack_from("<HHH", code, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", code, at + i * size) for i in range(count)]

    def name(header: tuple[int, ...]) -> str:
        start = headers[names][4] + header[0]
        return code[start : code.index(b"\0", start)].decode()

    return {name(h): code[h[4] : h[4] + h[5]] for h in headers if name(h).startswith(".text.")}


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
@pytest.mark.parametrize(("length", "dtype"), [(40, FP32), (1000, BF16), (8192, BF16)])
def test_the_compiler_finds_nothing_to_fuse(
    architecture: str, length: int, dtype: torch.dtype
) -> None:
    limits, size = DEVICES[architecture], dtype.itemsize
    types = {"X": dtype, "Y": dtype, "W": dtype}
    texts = []
    for few_rows in (False, True):
        constants = ALL | {"ROW_LENGTH": length, "HAS_BIAS": True}
        forward = plan.forward_plan(length, size, size, limits, few_rows)
        assert forward is not None
        texts.append(jit.program_text(programs.FORWARD, constants | forward.constants(), types))
        backward = plan.backward_plan(length, size, size, size, limits, True, few_rows)
        if backward is None:
            continue
        constants = ALL | {"ROW_LENGTH": length, "FEW_ROWS": few_rows, "STRIPS": 1}
        constants |= {"NEED_DX": True, "NEED_DWEIGHT": True, "NEED_DBIAS": True}
        texts.append(jit.program_text(programs.BACKWARD, constants | backward.constants(), types))
    constants = ALL | {"ROW_LENGTH": length, "HAS_BIAS": True, "STRIPS": 1}
    constants |= {"NEED_DWEIGHT": True, "NEED_DBIAS": True, "THREADS": plan.LONG_ROW_THREADS}
    constants |= {"VECTOR": plan.vector_length(length, size)}
    texts.append(jit.program_text(programs.LONG_ROWS, constants, types))
    for text in texts:
        code = _machine_code(text, architecture, True)
        assert code
        assert code == _machine_code(text, architecture, False)
